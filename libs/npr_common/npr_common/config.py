"""Where the other services are: the part of the deployment that every service reads (prefix `NPR_`)."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Addresses(BaseSettings):
    """Targets of the services and of the policy store. A service reads those it needs."""

    model_config = SettingsConfigDict(env_prefix="NPR_", frozen=True, extra="ignore")

    buffer_address: str = Field(default="127.0.0.1:7301", description="gRPC target of the buffer")
    reward_address: str = Field(default="127.0.0.1:7302", description="gRPC target of the reward service")
    rollout_address: str = Field(default="127.0.0.1:7303", description="gRPC target of the rollout service")
    learner_address: str = Field(default="127.0.0.1:7304", description="gRPC target of the learner")
    controller_address: str = Field(default="127.0.0.1:7305", description="gRPC target of the controller")
    policy_store_url: str = Field(default="file://.npr/policies", description="fsspec URL of the policy store")
    cache_dir: Path = Field(default=Path(".npr/cache"), description="local copies of policies")
