"""The `controller` service."""
