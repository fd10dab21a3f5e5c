"""The engine's own settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class EngineConfig(BaseModel):
    """Sizes of the engine and defaults of a request's limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    page_size: int = Field(default=16, ge=1, description="tokens of a KV page")
    pages: int = Field(default=4096, ge=2, description="KV pages")
    max_running: int = Field(default=64, ge=1, description="trajectories decoded at once")
    max_prefill_tokens: int = Field(default=8192, ge=1, description="prompt tokens admitted in one step")
    max_branches: int = Field(default=16, ge=1, description="branches of a block, where the request sets no limit")
    max_blocks: int = Field(default=16, ge=1, description="blocks of a trajectory, where the request sets no limit")
    audit_every_step: bool = Field(default=False, description="compare allocator and tables after every step")
