"""The `reward` service."""
