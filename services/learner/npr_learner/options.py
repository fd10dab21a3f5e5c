"""What a stage may be told: the typed form of `StartStageRequest.options_json`.

Invariants: immutable; an unknown key, or one out of its range, is an error that names it; units are in the names.
"""

from enum import StrEnum
from typing import Annotated, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from npr_common.errors import InvalidArgumentError


class Schedule(StrEnum):
    """The learning rate after warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"


class Malformed(StrEnum):
    """What becomes of a response that the structural filter refuses (SPEC section 5, stage 3)."""

    DROP = "drop"
    """As published: no gradient against it, so form can drift."""
    INCORRECT = "incorrect"
    """It counts as -1 in its group, and is trained on."""


class Precision(StrEnum):
    """A number format. Master weights and optimiser are float32 in any case."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch type of this name."""
        return torch.float32 if self is Precision.FLOAT32 else torch.bfloat16


class StageOptions(BaseModel):
    """Objective, optimiser and batching options of one stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: float = Field(gt=0)
    schedule: Schedule = Schedule.CONSTANT
    total_steps: int | None = Field(default=None, ge=1, description="length of the cosine; fine-tuning counts its own")
    warmup_steps: int = Field(default=0, ge=0)
    warmup_fraction: float | None = Field(
        default=None, ge=0, lt=1, description="of all steps; in place of warmup_steps"
    )
    weight_decay: float = Field(default=0.1, ge=0, description="on matrices; norms and biases have none")
    max_grad_norm: float = Field(default=1.0, gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    optimizer_epsilon: float = Field(default=1e-8, gt=0)

    micro_batch_tokens: int = Field(default=16_384, ge=1, description="most tokens of one pass")
    share_prompts: bool = Field(default=True, description="compute a prompt once for all of its responses in a pass")
    dtype: Precision = Field(default=Precision.FLOAT32, description="of the forward and backward passes")
    publish_dtype: Precision | None = Field(default=None, description="of published policies; unset: that of `dtype`")
    gradient_checkpointing: bool = False
    cpu_offload: bool = Field(default=False, description="keep split weights and optimiser in the host's memory")
    seed: int = Field(default=0, ge=0, description="orders fine-tuning's batches and DAPO's mini-batches")

    advantage_epsilon: float = Field(default=1e-6, gt=0)
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    dual_clip: float = Field(default=10.0, gt=1)
    minibatches_per_step: int = Field(default=1, ge=1, description="DAPO's optimiser steps per batch of rollouts")
    overlong_buffer_tokens: int = Field(default=0, ge=0, description="where the soft penalty grows; 0 is no penalty")
    overlong_penalty: float = Field(default=1.0, ge=0, description="taken off at the limit")

    malformed: Malformed = Malformed.DROP
    max_log_prob_drift_mean: float | None = Field(
        default=None, gt=0, description="nats between learner and engine, past which nothing is learned; unset: none"
    )

    epochs: int = Field(default=1, ge=1)
    tokens_per_update: int = Field(default=16_384, ge=1, description="of one optimiser step of fine-tuning, unpadded")
    checkpoint_every_steps: int = Field(
        default=100, ge=1, description="optimiser steps between checkpoints of fine-tuning"
    )

    @property
    def published_precision(self) -> Precision:
        """The number format of published policies."""
        return self.publish_dtype or self.dtype

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.warmup_fraction is not None and self.warmup_steps:
            raise ValueError("set warmup_steps or warmup_fraction, not both")
        return self


def parse_options(options_json: str) -> StageOptions:
    """The options in a JSON object.

    Raises:
        InvalidArgumentError: it is no JSON object, or a key is unknown, missing or out of range; each is a field
            violation `options.<key>`.
    """
    try:
        return StageOptions.model_validate_json(options_json or "{}")
    except ValidationError as error:
        fields = {".".join(["options", *map(str, item["loc"])]): item["msg"] for item in error.errors()}
        listed = "; ".join(f"{field}: {message}" for field, message in fields.items())
        raise InvalidArgumentError(
            f"the stage's options are not valid: {listed}", reason="INVALID_OPTIONS", field_violations=fields
        ) from error
