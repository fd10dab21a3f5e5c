"""`python -m npr_sglang`: see `launch.py`."""

import sys

from npr_sglang.launch import main

sys.exit(main())
