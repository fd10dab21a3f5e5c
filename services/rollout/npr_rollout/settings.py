"""Configuration of the rollout service, from the environment (prefix `NPR_ROLLOUT_`)."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from npr_common.config import Settings
from npr_rollout.engine.config import AttentionKind, KvDtype


class BackendKind(StrEnum):
    """The engine backends."""

    TORCH = "torch"
    SGLANG = "sglang"


class RolloutSettings(Settings):
    """Sizes of the engine, and how the worker takes work."""

    model_config = SettingsConfigDict(env_prefix="NPR_ROLLOUT_", frozen=True, extra="ignore")

    backend: BackendKind = Field(
        default=BackendKind.TORCH, description="what decodes: `torch`, in this process, or `sglang` (`NPR_SGLANG_...`)"
    )
    device: str = Field(default="auto", description="`auto`, `cpu`, `cuda`, `cuda:1`...")
    dtype: str = Field(
        default="auto",
        description="type of the weights: `float32`, `bfloat16`...; auto: as published; a CPU computes in float32",
    )
    torch_threads: int | None = Field(default=None, ge=1, description="CPU threads of one operation; unset: torch's")
    kv_memory_mib: int = Field(default=1024, ge=1, description="memory for keys and values")
    page_size: int = Field(default=16, ge=1, description="tokens of a KV page")
    max_running: int = Field(default=192, ge=1, description="trajectories decoded at once")
    prefill_tokens: int = Field(
        default=2048, ge=1, description="tokens of prompts and recomputed trajectories fed in a step, beside decoding"
    )
    attention: AttentionKind = Field(default=AttentionKind.AUTO, description="attention backend")
    kv_dtype: KvDtype = Field(
        default=KvDtype.AUTO, description="type of keys and values; auto: float32 on a CPU, the model's own on a GPU"
    )
    max_waiting: int = Field(default=1024, ge=1, description="Generate calls that may wait for the engine")
    max_branches: int = Field(default=16, ge=1, description="branches of a block, where a request sets no limit")
    max_blocks: int = Field(default=16, ge=1, description="blocks of a trajectory, where a request sets no limit")
    policy_line: str = Field(default="", description="policy line whose newest version is served from the start")
    worker: bool = Field(default=True, description="take work from the buffer")
    lease_groups: int = Field(default=8, ge=1, description="groups leased at once")
    lease_seconds: float = Field(default=20.0, ge=3, le=3600, description="life of a lease without renewal")
    lease_wait_seconds: float = Field(default=5.0, gt=0, le=60, description="how long a lease call waits for work")
    peer_wait_seconds: float = Field(default=600.0, gt=0, description="how long to wait for a peer that is away")
    audit_every_step: bool = Field(default=False, description="audit the KV pages after every engine step")
