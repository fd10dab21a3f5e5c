"""Where answers are judged: processes under limits that the service kills when a deadline passes."""

from npr_reward.sandbox.job import Job
from npr_reward.sandbox.limits import Limits
from npr_reward.sandbox.pool import SandboxPool

__all__ = ["Job", "Limits", "SandboxPool"]
