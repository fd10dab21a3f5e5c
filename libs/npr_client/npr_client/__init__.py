"""The Python SDK and the `npr` command."""
