"""The `buffer` service."""
