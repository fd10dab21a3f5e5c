"""`python -m npr_sglang`: see `launch.py`."""

from npr_sglang.launch import main

main()
