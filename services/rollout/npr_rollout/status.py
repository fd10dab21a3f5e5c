"""What an engine is doing, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace

from npr_rollout.record.outcomes import MalformedReason

_COUNTS = (
    "steps",
    "tokens",
    "forks",
    "joins",
    "preemptions",
    "evictions",
    "input_tokens",
    "cached_input_tokens",
    "scheduling_seconds",
    "forward_seconds",
    "sampling_seconds",
    "kv_tokens_read",
    "kv_tokens_attended",
)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the engine is doing; counts since it was made.

    Attributes:
        pages_used: pages that trajectories hold; `pages_cached` hold prompts that nobody uses now.
        scheduling_seconds: spent in scheduling, planning and taking samples into the records; likewise
            `forward_seconds` and `sampling_seconds`.
        kv_tokens_read: tokens whose keys and values attention has read, shared segments once a step.
        kv_tokens_attended: the same, had each row read its whole prefix by itself.
        input_tokens: fed to a server that decodes; `cached_input_tokens` of them had keys and values there already.
        server: what a server behind the engine says of itself, by name; nothing while it is away.
        joins_by_text: whether joins are made by feeding all branches again as plain text, for want of native ones.
    """

    running: int
    waiting: int
    pages_total: int
    pages_used: int
    steps: int
    tokens: int
    forks: int
    joins: int
    preemptions: int
    fork_refusals: dict[MalformedReason, int]
    pages_cached: int
    evictions: int
    scheduling_seconds: float
    forward_seconds: float
    sampling_seconds: float
    kv_tokens_read: int
    kv_tokens_attended: int
    joins_by_text: bool = False
    input_tokens: int = 0
    cached_input_tokens: int = 0
    server: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def zero(cls) -> EngineStatus:
        """An engine that was never there."""
        counts = {each.name: 0 for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING}
        return cls(**counts | {"fork_refusals": {}})  # type: ignore[arg-type]

    def plus(self, later: EngineStatus) -> EngineStatus:
        """The state of `later`, with the counts of both."""
        counts = {name: getattr(self, name) + getattr(later, name) for name in _COUNTS}
        refusals = dict(Counter(self.fork_refusals) + Counter(later.fork_refusals))
        return replace(later, fork_refusals=refusals, **counts)
