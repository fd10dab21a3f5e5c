"""How responses are decoded, in a recipe's words."""

from typing import Literal

from pydantic import Field

from npr.types.v1 import sampling_pb2
from npr_controller.recipe.base import RecipePart

_REFUSALS = {
    "reject": sampling_pb2.FORK_REFUSAL_POLICY_REJECT,
    "serialize": sampling_pb2.FORK_REFUSAL_POLICY_SERIALIZE,
}


class Decoding(RecipePart):
    """Sampling and the limits of a trajectory's ledger; a limit left out is the engine's own."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, ge=1)
    max_tokens: int | None = Field(default=None, ge=1, description="tokens over all branches, forced ones included")
    max_critical_tokens: int | None = Field(default=None, ge=1)
    max_branch_tokens: int | None = Field(default=None, ge=1)
    max_branches: int | None = Field(default=None, ge=1)
    max_blocks: int | None = Field(default=None, ge=1)
    fork_refusal: Literal["reject", "serialize"] = "reject"

    def to_proto(self, visibility: "sampling_pb2.Visibility.ValueType", seed: int) -> sampling_pb2.DecodingSpec:
        """The engine's form, for one group whose first sample is drawn with `seed`."""
        return sampling_pb2.DecodingSpec(
            sampling=sampling_pb2.Sampling(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                repetition_penalty=self.repetition_penalty,
                seed=seed,
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
        )
