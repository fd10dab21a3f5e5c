"""How a caller says what the engine shall do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from npr.types.v1 import sampling_pb2


class BranchShare(StrEnum):
    """How the tokens that are left are shared out between the branches of a block."""

    FIRST_COME = "first_come"
    FAIR = "fair"


class Exhaustion(StrEnum):
    """What happens when a branch's budget, or the account that all draw from, is used up."""

    CLOSE = "close"
    TRUNCATE = "truncate"


_SHARES = {
    BranchShare.FIRST_COME: sampling_pb2.BRANCH_SHARE_FIRST_COME,
    BranchShare.FAIR: sampling_pb2.BRANCH_SHARE_FAIR,
}
_EXHAUSTIONS = {
    Exhaustion.CLOSE: sampling_pb2.EXHAUSTION_CLOSE,
    Exhaustion.TRUNCATE: sampling_pb2.EXHAUSTION_TRUNCATE,
}


@dataclass(frozen=True)
class BudgetOptions:
    """How a trajectory's tokens are spent on branches.

    Attributes:
        takeaway_reserve_tokens: what branches may not use: it is kept for what follows the join.
        quorum: once this many branches of a block have closed themselves, those whose spans have `straggler_factor`
            times the tokens of the longest of them are closed; 0 is off.
        min_mean_log_prob: a branch is closed when the mean log-probability of its last 32 sampled tokens is below this;
            0 is off.
    """

    share: BranchShare = BranchShare.FIRST_COME
    on_exhausted: Exhaustion = Exhaustion.CLOSE
    takeaway_reserve_tokens: int = 0
    quorum: int = 0
    straggler_factor: float = 0.0
    min_mean_log_prob: float = 0.0

    def to_proto(self) -> sampling_pb2.BudgetPolicy:
        """The same as a message."""
        return sampling_pb2.BudgetPolicy(
            share=_SHARES[self.share],
            on_exhausted=_EXHAUSTIONS[self.on_exhausted],
            takeaway_reserve_tokens=self.takeaway_reserve_tokens,
            early_stop=sampling_pb2.EarlyStop(
                quorum=self.quorum,
                straggler_factor=self.straggler_factor,
                min_mean_log_prob=self.min_mean_log_prob,
            ),
        )


@dataclass(frozen=True)
class DecodingOptions:
    """Sampling, limits and budget policy of one request or job. A limit of 0 means the engine's own default.

    Attributes:
        min_p: keep tokens at least this fraction as likely as the likeliest one, in [0, 1); 0 keeps all.
        raw_log_probs: record the tokens' log-probabilities under the model's own softmax too.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 0
    max_critical_tokens: int = 0
    max_branch_tokens: int = 0
    max_branches: int = 0
    max_blocks: int = 0
    sequential: bool = False
    reject_refused_forks: bool = False
    min_p: float = 0.0
    raw_log_probs: bool = False
    budget: BudgetOptions = BudgetOptions()

    def to_proto(self) -> sampling_pb2.DecodingSpec:
        """The same as a message."""
        return sampling_pb2.DecodingSpec(
            sampling=self._sampling(),
            limits=self._limits(),
            visibility=sampling_pb2.VISIBILITY_SEQUENTIAL if self.sequential else sampling_pb2.VISIBILITY_PARALLEL,
            fork_refusal=(
                sampling_pb2.FORK_REFUSAL_POLICY_REJECT
                if self.reject_refused_forks
                else sampling_pb2.FORK_REFUSAL_POLICY_SERIALIZE
            ),
            budget=self.budget.to_proto(),
        )

    def _sampling(self) -> sampling_pb2.Sampling:
        return sampling_pb2.Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            min_p=self.min_p,
            raw_log_probs=self.raw_log_probs,
        )

    def _limits(self) -> sampling_pb2.Limits:
        return sampling_pb2.Limits(
            max_tokens=self.max_tokens,
            max_critical_tokens=self.max_critical_tokens,
            max_branch_tokens=self.max_branch_tokens,
            max_branches=self.max_branches,
            max_blocks=self.max_blocks,
        )
