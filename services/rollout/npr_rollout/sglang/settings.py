"""Configuration of the SGLang backend, from the environment (prefix `NPR_SGLANG_`)."""

from __future__ import annotations

import difflib
import os
from typing import Literal, Self

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from npr_common.config import Settings, WrongSettingsError
from npr_rollout.sglang.weights import WeightWay

_OTHERS = {"NPR_SGLANG_HOME"}
"""Variables of `scripts/setup-sglang.sh`."""


class SglangSettings(Settings):
    """The server: one that the rollout service starts and ends, or one that runs already."""

    model_config = SettingsConfigDict(env_prefix="NPR_SGLANG_", frozen=True, extra="ignore")

    url: str = Field(
        default="", description="a server that runs already, such as `http://10.0.0.5:30000`; empty: one is started"
    )
    plugin: bool = Field(
        default=True, description="start the server with the plug-in; without it joins are made by text, not natively"
    )
    python: str = Field(default="python", description="the Python of the environment that SGLang is installed in")
    device: Literal["cuda", "cpu"] = Field(default="cuda", description="`cuda` or `cpu`")
    dtype: str = Field(default="auto", description="type of the weights; auto: as published")
    attention_backend: str = Field(
        default="", description="`flashinfer`, `fa3`, `torch_native`...; empty: SGLang's own"
    )
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs that share one policy")
    memory_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="of the GPU's memory, for weights, keys and values; 0: SGLang's own choice"
    )
    pool_tokens: int = Field(default=0, ge=0, description="tokens whose keys and values are kept; 0: as many as fit")
    input_tokens: int = Field(
        default=0, ge=0, description="longest input with all branches in line; 0: twice the model's context"
    )
    cuda_graphs: bool = Field(default=True, description="decode by CUDA graphs")
    overlap: bool | None = Field(
        default=None,
        description="prepare a step while another one runs; unless set: on a GPU",
    )
    stream_interval: int = Field(
        default=8, ge=1, description="tokens that the server tells of at once, where nobody watches"
    )
    start_seconds: float = Field(default=900.0, gt=0, description="how long the server may take to start")
    silence_seconds: float = Field(
        default=300.0,
        gt=0,
        description="how long the server may bring no token of any trajectory, before it is given up",
    )
    threads: int = Field(default=1, ge=1, description="CPU threads of one operation, on a CPU")
    arguments: list[str] = Field(default=[], description="more arguments of `sglang.launch_server`, a JSON list")
    weights: WeightWay = Field(
        default=WeightWay.DISK,
        description="how weights get into a running server: `disk`, `tensors` (same host), or `group` (any host)",
    )
    group_backend: str = Field(
        default="gloo", description="of the group's broadcast; `nccl` where this process has a GPU of its own"
    )
    group_address: str = Field(default="127.0.0.1", description="of this host, as the server reaches it")
    memory_saver: bool = Field(
        default=False, description="keep the server while it sleeps, without its memory (a GPU); else it is ended"
    )

    @classmethod
    def from_environment(cls) -> Self:
        """The settings. Raises WrongSettingsError also where a variable has their prefix and is none of them."""
        prefix = cls.model_config["env_prefix"]
        known = {f"{prefix}{field}".upper() for field in cls.model_fields} | _OTHERS
        unknown = sorted(name for name in os.environ if name.startswith(prefix) and name not in known)
        if unknown:
            near = {name: difflib.get_close_matches(name, known, 1) for name in unknown}
            raise WrongSettingsError(
                {name: f"is no variable{f'; {found[0]} is' if found else ''}" for name, found in near.items()}
            )
        return cls()
