"""Deployment of the controller, from the environment (prefix `NPR_CONTROLLER_`)."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from npr_common.config import Settings


class ControllerSettings(Settings):
    """Where the run state is, and how long to wait for whom."""

    model_config = SettingsConfigDict(env_prefix="NPR_CONTROLLER_", frozen=True, extra="ignore")

    redis_url: str = Field(default="redis://127.0.0.1:6379/0", description="Redis or Valkey with an append-only file")
    lease_seconds: float = Field(default=6.0, gt=0, description="how long a dead leader's lease lives")
    patience_seconds: float = Field(default=180.0, gt=0, description="how long a service may be away")
    stall_seconds: float = Field(default=900.0, gt=0, description="how long no rollout may finish")
    redis_retry_seconds: float = Field(default=1.0, gt=0, description="longest pause before Redis is tried again")
