"""Configuration of the buffer, from the environment (prefix `NPR_BUFFER_`)."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from npr_common.config import Settings


class BufferSettings(Settings):
    """Where Redis is and how patient the buffer is."""

    model_config = SettingsConfigDict(env_prefix="NPR_BUFFER_", frozen=True, extra="ignore")

    redis_url: str = Field(default="redis://127.0.0.1:6379/0", description="redis:// or rediss:// URL")
    require_durable: bool = Field(default=True, description="refuse a Redis without append-only file, or that evicts")
    redis_timeout_seconds: float = Field(default=10.0, gt=0, description="longest wait for one Redis command")
    redis_connections: int = Field(default=64, ge=2, description="most connections to Redis")
    max_open_groups: int = Field(default=65_536, ge=1, description="groups of a run neither consumed nor discarded")
    full_retry_seconds: float = Field(default=5.0, gt=0, description="RetryInfo of a full run or a full Redis")
    recheck_seconds: float = Field(default=5.0, gt=0, description="longest a long poll trusts pub/sub alone")
    ping_seconds: float = Field(default=0.5, gt=0, description="how often Redis is asked whether it lives")
    sweep_seconds: float = Field(default=5.0, gt=0, description="how often ended leases are swept without a lease call")
    heal_seconds: float = Field(default=30.0, gt=0, description="how often the index of runs is checked against them")
