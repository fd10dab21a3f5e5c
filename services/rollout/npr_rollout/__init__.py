"""The `rollout` service."""
