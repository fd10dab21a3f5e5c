"""How records grow: what a sampled token does to its trajectory.

Invariants:
- No state is undefined: whatever a model writes ends in one typed outcome.
- What is decided depends on the record alone, and on a block only once all its open branches have taken the same
  step's tokens: not on who decodes, on batch mates, or on the pace of a branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from npr_common.schema import State
from npr_rollout.record.fork_join import end_branch, enforce_budgets, fork, join
from npr_rollout.record.live import LiveTrajectories
from npr_rollout.record.outcomes import BranchStop, ForkRefusal, LimitKind, MalformedReason, Outcome
from npr_rollout.record.trajectory import Body, Drawn, Span, Trajectory
from npr_rollout.record.trunk_grammar import TagVerdict
from npr_rollout.record.validation import ForkValidator


class Growth:
    """Takes sampled tokens into the records.

    Attributes:
        forks, joins: how many there have been.
        refusals: forks that were refused, by reason.
    """

    def __init__(
        self,
        live: LiveTrajectories,
        eos: frozenset[int],
        validator: ForkValidator | None,
        new_body: Callable[[], Body],
    ) -> None:
        """Rules for one tokenizer and dialect.

        Args:
            eos: ids that end a text.
            validator: None where nothing ever forks.
            new_body: makes an empty record of what a step's body has said, for the repetition penalty.
        """
        self._live = live
        self._eos = eos
        self._tags = validator.tags if validator is not None else None
        self._special = eos | frozenset(self._tags or ())
        if validator is not None:
            self._validator = validator
            self._cues = validator.cues
        self._new_body = new_body
        self.forks = 0
        self.joins = 0
        self.refusals: Counter[MalformedReason] = Counter()

    def take(self, spans: Sequence[Span], samples: Iterable[Drawn]) -> None:
        """Take one sampled token into each span's record; with one branch of a block come all that are open."""
        special = self._special
        for span, drawn in zip(spans, samples, strict=True):
            trajectory = span.owner
            if trajectory.finished:
                continue
            if drawn.token not in special:
                span.add(drawn)
                trajectory.ledger.spend()
                if span.seen is not None:
                    span.seen[drawn.token] = True
                if not span.is_branch:
                    self._check_trunk_limits(trajectory)
            elif span.is_branch:
                self._special_in_branch(span, drawn)
            else:
                self._special_in_trunk(span, drawn)
        self._go_on_with_blocks(span.owner for span in spans if span.is_branch)

    # --- tags and ends of text ---

    def _special_in_branch(self, span: Span, drawn: Drawn) -> None:
        """A branch ends at its `</step>` or EOS; any other tag ends the trajectory when all have taken their tokens."""
        if drawn.token == self._cues.step_end:
            span.add(drawn)
            end_branch(span, BranchStop.CLOSED, self._cues)
        elif drawn.token in self._eos:
            end_branch(span, BranchStop.EOS, self._cues)
        else:
            span.add(drawn)
            span.owner.ledger.spend()
            end_branch(span, BranchStop.TAG, self._cues)

    def _special_in_trunk(self, span: Span, drawn: Drawn) -> None:
        trajectory = span.owner
        span.add(drawn)
        trajectory.ledger.spend()
        if drawn.token in self._eos:
            self._end_of_text(trajectory)
        elif trajectory.grammar is not None and self._tags is not None:
            verdict = trajectory.grammar.take(self._tags.tag_of[drawn.token], len(span.tokens) - 1)
            self._trunk_tag(trajectory, verdict)
        if not trajectory.finished and trajectory.open_block is None:
            self._check_trunk_limits(trajectory)

    def _end_of_text(self, trajectory: Trajectory) -> None:
        if trajectory.grammar is None or trajectory.grammar.state is State.PROSE:
            self._live.finish(trajectory, Outcome.COMPLETED)
        else:
            message = f"The text ends inside a block ({trajectory.grammar.state.value})."
            self._malformed(trajectory, MalformedReason.UNEXPECTED_TAG, message)

    def _trunk_tag(self, trajectory: Trajectory, verdict: TagVerdict) -> None:
        if verdict is TagVerdict.GUIDELINE_CLOSED:
            self._fork_or_refuse(trajectory)
        elif verdict is TagVerdict.UNEXPECTED:
            message = "A structural tag stands where the grammar has none."
            self._malformed(trajectory, MalformedReason.UNEXPECTED_TAG, message)
        elif verdict is TagVerdict.IN_STEP:
            message = "A structural tag stands in a serialized step."
            self._malformed(trajectory, MalformedReason.TAG_IN_STEP, message)
        elif verdict is TagVerdict.STEP_OPENED:
            trajectory.trunk.seen = self._body(trajectory)
        elif verdict is TagVerdict.STEP_CLOSED:
            trajectory.trunk.seen = None

    # --- forks and joins ---

    def _fork_or_refuse(self, trajectory: Trajectory) -> None:
        assert trajectory.grammar is not None
        if trajectory.ledger.trunk_limit(trajectory.critical) is not LimitKind.NONE:
            return  # truncated right here, which is no refusal
        reason = self._validator.refusal(trajectory)
        if reason is MalformedReason.NONE:
            self.forks += 1
            block = fork(trajectory, trajectory.grammar.plans, self._cues)
            for branch in block.branches:
                branch.seen = self._body(trajectory)
            self._go_on_with_blocks([trajectory])
            return
        self.refusals[reason] += 1
        if trajectory.request.fork_refusal is ForkRefusal.REJECT:
            self._malformed(trajectory, reason, "The fork was refused.")
        else:
            trajectory.serialized_blocks += 1
            trajectory.serialized_reason = reason

    def _go_on_with_blocks(self, trajectories: Iterable[Trajectory]) -> None:
        """Once all branches have taken their tokens, in whatever order: end, close or join what has come to its end."""
        for trajectory in dict.fromkeys(trajectories):
            block = trajectory.open_block
            if trajectory.finished or block is None:
                continue
            if any(branch.stop is BranchStop.TAG for branch in block.branches):
                self._malformed(trajectory, MalformedReason.TAG_IN_STEP, "A structural tag stands in a step.")
                continue
            self._truncate_at(trajectory, enforce_budgets(trajectory, block, self._cues))
            if not trajectory.finished and block.closed:
                join(trajectory, self._cues)
                self.joins += 1
                self._check_trunk_limits(trajectory)

    # --- limits and ends ---

    def _check_trunk_limits(self, trajectory: Trajectory) -> None:
        self._truncate_at(trajectory, trajectory.ledger.trunk_limit(trajectory.critical))

    def _truncate_at(self, trajectory: Trajectory, limit: LimitKind) -> None:
        """End a trajectory at the limit that it has reached, if it has reached one."""
        if limit is not LimitKind.NONE:
            message = f"It reached its limit: {limit.name.lower()}."
            self._live.finish(trajectory, Outcome.TRUNCATED, message, limit=limit)

    def _malformed(self, trajectory: Trajectory, reason: MalformedReason, message: str) -> None:
        self._live.finish(trajectory, Outcome.MALFORMED, message, reason=reason)

    def _body(self, trajectory: Trajectory) -> Body | None:
        """What a step's body has said so far: nothing. None when no penalty is on."""
        return None if trajectory.request.sampling.repetition_penalty == 1.0 else self._new_body()
