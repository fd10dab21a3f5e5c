"""Options of the learner that a recipe may set. What is left out is the learner's default (its StageOptions).

The names are the learner's own: the options travel to it as JSON, and it refuses those that it doesn't know.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from npr_controller.recipe.base import RecipePart

Beta = Annotated[float, Field(ge=0, lt=1)]


class Learning(RecipePart):
    """Optimiser and batching, for every objective."""

    learning_rate: float = Field(gt=0)
    schedule: Literal["constant", "cosine"] | None = None
    weight_decay: float | None = Field(default=None, ge=0)
    max_grad_norm: float | None = Field(default=None, gt=0)
    betas: tuple[Beta, Beta] | None = None
    optimizer_epsilon: float | None = Field(default=None, gt=0)
    micro_batch_tokens: int | None = Field(default=None, ge=1, description="most tokens of one pass")
    share_prompts: bool | None = Field(default=None, description="compute a prompt once for its responses in a pass")
    dtype: Literal["float32", "bfloat16"] | None = None
    gradient_checkpointing: bool | None = None
    cpu_offload: bool | None = Field(default=None, description="keep split weights in the host's memory")

    def options(self, **derived: Any) -> dict[str, Any]:
        """The options that are set, with those that the controller derives (schedule length, seed...)."""
        return self.model_dump(exclude_none=True, mode="json") | derived


class PolicyGradient(Learning):
    """DAPO and PAPO."""

    warmup_steps: int | None = Field(default=None, ge=0)
    advantage_epsilon: float | None = Field(default=None, gt=0)
    minibatches_per_step: int | None = Field(default=None, ge=1, description="DAPO: updates a step")
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    clip_high: float | None = Field(default=None, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    overlong_buffer_tokens: int | None = Field(default=None, ge=0)
    overlong_penalty: float | None = Field(default=None, ge=0)


class FineTuning(Learning):
    """Parallel SFT."""

    epochs: int | None = Field(default=None, ge=1)
    tokens_per_update: int | None = Field(default=None, ge=1)
    warmup_fraction: float | None = Field(default=None, ge=0, lt=1, description="of all updates")
    checkpoint_every_steps: int | None = Field(default=None, ge=1, description="updates between checkpoints")
