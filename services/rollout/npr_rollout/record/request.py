"""What is asked of the engine, and what it answers. All of it is immutable."""

from __future__ import annotations

from dataclasses import dataclass, field

from npr_rollout.record.outcomes import (
    BranchShare,
    BranchStop,
    Exhaustion,
    ForkRefusal,
    LimitKind,
    MalformedReason,
    Outcome,
    Visibility,
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        temperature: softmax temperature; 0 takes the likeliest token.
        top_p: nucleus mass in (0, 1].
        top_k: keep the k likeliest tokens; 0 keeps all.
        repetition_penalty: divides (or multiplies, if negative) the logits of tokens that the step's own body holds
            already; 1 is off.
        seed: with the prompt it fixes every draw, whatever else is decoded beside it.
        min_p: keep tokens at least this fraction as likely as the likeliest one, in [0, 1); 0 keeps all.
        raw_log_probs: record the drawn tokens' log-probabilities under the model's own softmax too.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    raw_log_probs: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits checked against the ledger, in tokens. None means the engine's default."""

    max_tokens: int | None = None
    max_critical_tokens: int | None = None
    max_branch_tokens: int | None = None
    max_branches: int | None = None
    max_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """When branches that lose are ended before their budget is. All zero: never.

    Attributes:
        quorum: once this many branches of the block have closed themselves, stragglers are measured; 0 is off.
        straggler_factor: a straggler is closed when its span has this many times the tokens of the longest branch that
            closed itself; at least 1 where `quorum` is set.
        min_mean_log_prob: a branch is closed when the mean behaviour log-probability of its last 32 sampled tokens is
            below this; 0 is off.
    """

    quorum: int = 0
    straggler_factor: float = 0.0
    min_mean_log_prob: float = 0.0


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    """How a trajectory's token budget is spent on branches.

    Attributes:
        takeaway_reserve_tokens: what branches may not use, of the total and of the critical path: it is kept for what
            follows the join.
    """

    share: BranchShare = BranchShare.FIRST_COME
    on_exhausted: Exhaustion = Exhaustion.CLOSE
    takeaway_reserve_tokens: int = 0
    early_stop: EarlyStop = EarlyStop()


@dataclass(frozen=True, slots=True)
class Request:
    """One trajectory to decode.

    Attributes:
        prompt_ids: P >= 1 token ids.
        priority: higher first; the lowest is preempted first.
        deadline: `time.monotonic()` after which it ends; None waits for ever.
        stream: whether `TokensEvent`s are wanted.
        job: whom it is decoded for; jobs of one priority share the engine evenly.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    limits: Limits = Limits()
    visibility: Visibility = Visibility.PARALLEL
    fork_refusal: ForkRefusal = ForkRefusal.REJECT
    priority: int = 0
    deadline: float | None = None
    stream: bool = False
    job: str = ""
    budget: BudgetPolicy = BudgetPolicy()


@dataclass(frozen=True, slots=True)
class BranchReport:
    """What one branch was given and used, in tokens of its span."""

    budget_tokens: int
    used_tokens: int
    forced_tokens: int
    stop: BranchStop
    started_at: float
    finished_at: float


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One forked block."""

    branches: tuple[BranchReport, ...]
    started_at: float
    finished_at: float

    @property
    def critical_path_tokens(self) -> int:
        """Length of the longest branch span."""
        return max(branch.used_tokens for branch in self.branches)


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """Tokens after the prompt, steps and pages of one trajectory over all its branches.

    Attributes:
        limits: what it was held to, defaults filled in; None for a request that was refused.
        budget: likewise.
    """

    total_tokens: int = 0
    critical_path_tokens: int = 0
    forced_tokens: int = 0
    engine_steps: int = 0
    peak_pages: int = 0
    preemptions: int = 0
    blocks: tuple[BlockReport, ...] = ()
    limits: Limits | None = None
    budget: BudgetPolicy | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A finished trajectory in canonical order (SPEC section 2).

    Attributes:
        token_ids: prompt and response.
        log_probs: one natural-log probability a response token, under the distribution it was drawn from; 0 if forced.
        forced: one flag a response token: the engine put it there.
        raw_log_probs: one a response token, under the model's own softmax; 0 if forced. Empty unless asked for.
        malformed_reason: why it is malformed, or why its last serialized block was.
        started_at: seconds since the epoch, when it was admitted; likewise `finished_at`.
        textual_joins: joins for which all branches were fed again as plain text, not under the parallel rule.
    """

    request_id: str
    token_ids: tuple[int, ...]
    prompt_length: int
    log_probs: tuple[float, ...]
    forced: tuple[bool, ...]
    policy_version: int
    visibility: Visibility
    outcome: Outcome
    malformed_reason: MalformedReason = MalformedReason.NONE
    limit: LimitKind = LimitKind.NONE
    branch_truncated: bool = False
    serialized_blocks: int = 0
    ledger: LedgerReport = field(default_factory=LedgerReport)
    started_at: float = 0.0
    finished_at: float = 0.0
    message: str = ""
    raw_log_probs: tuple[float, ...] = ()
    textual_joins: int = 0


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """New tokens of one place in the tree; `block` and `branch` are -1 outside of a branch."""

    request_id: str
    block: int
    branch: int
    position: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    forced: tuple[bool, ...]
    raw_log_probs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The end of a trajectory."""

    result: Result


Event = TokensEvent | FinishedEvent
