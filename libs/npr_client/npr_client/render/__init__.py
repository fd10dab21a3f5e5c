"""What people see: trajectories as trees, jobs and runs as progress, everything else as tables.

Invariants: nothing here calls a service; a model's text is never read as markup; what is drawn is data first
(`view`), so that `--json` and the terminal tell the same.
"""
