"""The `learner` service."""
