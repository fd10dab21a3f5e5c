"""Configuration of the learner, from the environment (prefix `NPR_LEARNER_`)."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from npr_common.config import Settings


class LearnerSettings(Settings):
    """Where the learner computes and how long it waits."""

    model_config = SettingsConfigDict(env_prefix="NPR_LEARNER_", frozen=True, extra="ignore")

    device: str = Field(default="auto", description="`auto`, `cpu`, `cuda`, `cuda:1`...")
    torch_threads: int | None = Field(
        default=None, ge=1, description="CPU threads of one operation; unset: torch's own"
    )
    workers: int = Field(
        default=0,
        ge=0,
        description="Ray workers that share the weights, each with a GPU on `cuda`; 0: this process alone",
    )
    ray_address: str = Field(default="local", description="`local`, `auto` or an address, as `ray.init` takes it")
    worker_timeout_seconds: float = Field(default=600.0, gt=0, description="how long a worker waits for another one")
    buffer_wait_seconds: float = Field(default=120.0, gt=0, description="how long to wait for a buffer that is away")
