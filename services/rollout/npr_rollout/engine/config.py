"""The engine's own settings."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class AttentionKind(StrEnum):
    """The attention backends (`engine/attention/`)."""

    AUTO = "auto"
    CASCADE = "cascade"
    FLASHINFER = "flashinfer"
    SDPA = "sdpa"


class KvDtype(StrEnum):
    """What keys and values are kept as."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class EngineConfig(BaseModel):
    """Sizes of the engine and defaults of a request's limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    page_size: int = Field(default=16, ge=1, description="tokens of a KV page")
    pages: int = Field(default=4096, ge=2, description="KV pages")
    max_running: int = Field(default=64, ge=1, description="trajectories decoded at once")
    prefill_tokens: int = Field(
        default=2048, ge=1, description="tokens of prompts and recomputed trajectories fed in one step, beside decoding"
    )
    max_branches: int = Field(default=16, ge=1, description="branches of a block, where the request sets no limit")
    max_blocks: int = Field(default=16, ge=1, description="blocks of a trajectory, where the request sets no limit")
    attention: AttentionKind = Field(default=AttentionKind.AUTO, description="attention backend")
    kv_dtype: KvDtype = Field(
        default=KvDtype.AUTO, description="type of keys and values; auto: float32 on a CPU, the model's own on a GPU"
    )
    audit_every_step: bool = Field(default=False, description="compare allocator and tables after every step")
