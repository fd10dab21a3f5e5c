"""The `npr` command, one file a group of commands.

Invariants: results go to standard output, everything said to a person while waiting goes to standard error; with
`--json` standard output holds JSON only; an error is one line that says what to do, and exit code 2.
"""
