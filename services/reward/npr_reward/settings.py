"""Deployment of the reward service, from the environment (prefix `NPR_REWARD_`)."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from npr_common.config import Settings
from npr_reward.sandbox import Limits


class RewardSettings(Settings):
    """How many processes judge, under which limits, and with which verifiers."""

    model_config = SettingsConfigDict(env_prefix="NPR_REWARD_", frozen=True, extra="ignore")

    workers: int | None = Field(default=None, ge=1, description="sandbox processes; unset: one a core")
    deadline_seconds: float = Field(default=5.0, gt=0, description="wall-clock time of one judgement")
    memory_mib: int = Field(default=512, ge=256, description="address space of one sandbox process")
    max_waiting: int = Field(default=8192, ge=1, description="pending judgements beyond which callers are refused")
    extra_verifiers: tuple[str, ...] = Field(
        default=(), description='JSON list of verifiers to load besides the built-in ones, each "package.module:Class"'
    )

    @property
    def limits(self) -> Limits:
        """The sandbox's limits."""
        return Limits(deadline_seconds=self.deadline_seconds, memory_mib=self.memory_mib)
