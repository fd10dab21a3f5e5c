"""How responses are decoded, in a recipe's words."""

from typing import Literal, Self

from pydantic import Field, model_validator

from npr.types.v1 import sampling_pb2
from npr_controller.recipe.base import RecipePart

_REFUSALS = {
    "reject": sampling_pb2.FORK_REFUSAL_POLICY_REJECT,
    "serialize": sampling_pb2.FORK_REFUSAL_POLICY_SERIALIZE,
}


_SHARES = {
    "first_come": sampling_pb2.BRANCH_SHARE_FIRST_COME,
    "fair": sampling_pb2.BRANCH_SHARE_FAIR,
}
_EXHAUSTIONS = {
    "close": sampling_pb2.EXHAUSTION_CLOSE,
    "truncate": sampling_pb2.EXHAUSTION_TRUNCATE,
}


class EarlyStop(RecipePart):
    """When branches that lose are ended before their budget is; each of the two rules is off unless set."""

    quorum: int = Field(default=0, ge=0, description="branches that have closed themselves before others are measured")
    straggler_factor: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="of the longest of those")
    min_mean_log_prob: float = Field(
        default=0.0, le=0, allow_inf_nan=False, description="over a branch's last 32 sampled tokens"
    )

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if self.quorum and self.straggler_factor < 1:
            raise ValueError("quorum needs a straggler_factor of at least 1")
        if self.straggler_factor and not self.quorum:
            raise ValueError("straggler_factor needs a quorum")
        return self


class Budget(RecipePart):
    """How a trajectory's tokens are spent on branches."""

    share: Literal["first_come", "fair"] = "first_come"
    on_exhausted: Literal["close", "truncate"] = "close"
    takeaway_reserve_tokens: int = Field(default=0, ge=0, description="kept for what follows the join")
    early_stop: EarlyStop = EarlyStop()

    def to_proto(self) -> sampling_pb2.BudgetPolicy:
        """The engine's form."""
        return sampling_pb2.BudgetPolicy(
            share=_SHARES[self.share],
            on_exhausted=_EXHAUSTIONS[self.on_exhausted],
            takeaway_reserve_tokens=self.takeaway_reserve_tokens,
            early_stop=sampling_pb2.EarlyStop(
                quorum=self.early_stop.quorum,
                straggler_factor=self.early_stop.straggler_factor,
                min_mean_log_prob=self.early_stop.min_mean_log_prob,
            ),
        )


class Decoding(RecipePart):
    """Sampling, the limits of a trajectory's ledger and its budget policy; a limit left out is the engine's own."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, lt=1)
    repetition_penalty: float = Field(default=1.0, ge=1)
    raw_log_probs: bool = Field(default=False, description="record log-probabilities under the model's own softmax too")
    max_tokens: int | None = Field(default=None, ge=1, description="tokens over all branches, forced ones included")
    max_critical_tokens: int | None = Field(default=None, ge=1)
    max_branch_tokens: int | None = Field(default=None, ge=1)
    max_branches: int | None = Field(default=None, ge=1)
    max_blocks: int | None = Field(default=None, ge=1)
    fork_refusal: Literal["reject", "serialize"] = "reject"
    budget: Budget = Budget()

    @model_validator(mode="after")
    def _reserve_leaves_something(self) -> Self:
        if self.max_tokens is not None and self.budget.takeaway_reserve_tokens >= self.max_tokens:
            raise ValueError("budget.takeaway_reserve_tokens leaves branches nothing of max_tokens")
        return self

    def to_proto(self, visibility: "sampling_pb2.Visibility.ValueType", seed: int) -> sampling_pb2.DecodingSpec:
        """The engine's form, for one group whose first sample is drawn with `seed`."""
        return sampling_pb2.DecodingSpec(
            sampling=sampling_pb2.Sampling(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                repetition_penalty=self.repetition_penalty,
                seed=seed,
                min_p=self.min_p,
                raw_log_probs=self.raw_log_probs,
            ),
            limits=sampling_pb2.Limits(
                max_tokens=self.max_tokens or 0,
                max_critical_tokens=self.max_critical_tokens or 0,
                max_branch_tokens=self.max_branch_tokens or 0,
                max_branches=self.max_branches or 0,
                max_blocks=self.max_blocks or 0,
            ),
            visibility=visibility,
            fork_refusal=_REFUSALS[self.fork_refusal],
            budget=self.budget.to_proto(),
        )
