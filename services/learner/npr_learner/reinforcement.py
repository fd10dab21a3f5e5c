"""One reinforcement-learning step: from scored groups to rows with advantages, and from rows to an update.

Invariants:
- A step trains on one policy's trajectories, decoded under the stage's own visibility, from its whole distribution
  at a temperature; what is trained is the policy at that temperature.
- Statistics are taken once, over the whole batch, before it is cut into mini- or micro-batches.
- PAPO takes exactly one optimiser step; DAPO and GRPO take one a mini-batch, whole groups together.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from npr.buffer.v1 import buffer_pb2
from npr.learner.v1 import learner_pb2
from npr.types.v1 import policy_pb2, sampling_pb2, trajectory_pb2
from npr_common.errors import FailedPreconditionError, InvalidArgumentError
from npr_learner.filters import Defect, StructuralFilter, is_usable, require_policy, require_visibility
from npr_learner.gradient import Drift, GradientSummary, Observer, accumulate_gradient, trained_tokens
from npr_learner.objectives import overlong_penalty
from npr_learner.optim import apply_update, learning_rate_at
from npr_learner.options import Malformed, StageOptions
from npr_learner.policy import Policy
from npr_learner.row import Row, row_of_trajectory
from npr_learner.rules import RULES, Rules
from npr_learner.world import World


@dataclass(frozen=True)
class Response:
    """A response that is trained on, and what it earned."""

    group: buffer_pb2.Group
    scored: trajectory_pb2.ScoredTrajectory
    reward: float


@dataclass(frozen=True)
class Selection:
    """The kept responses of a batch, and what is known of those that were not."""

    kept: tuple[Response, ...]
    total: int
    usable: int
    correct: int
    defects: Counter[Defect]

    def metrics(self) -> dict[str, float]:
        """Shares and means. Rates are of the responses that were decoded and judged."""
        usable = max(1, self.usable)
        return {
            "trajectories": self.total,
            "kept_fraction": len(self.kept) / max(1, self.total),
            "malformed_rate": self.defects.total() / usable,
            "accuracy": self.correct / usable,
            "reward_mean": float(np.mean([response.reward for response in self.kept])) if self.kept else 0.0,
        }


def require_whole_distribution(group: buffer_pb2.Group, rules: Rules) -> None:
    """Refuse groups that were not drawn from a whole softmax: the policy that drew them has no gradient of its own.

    PAPO uses no behaviour log-probabilities and so bears the engine's mild repetition penalty (SPEC section 3).

    Raises:
        FailedPreconditionError: reason `DISTORTED_SAMPLING`.
    """
    sampling = group.decoding.sampling
    penalised = sampling.repetition_penalty not in (0.0, 1.0) and not rules.strictly_on_policy
    cut = sampling.top_p not in (0.0, 1.0) or sampling.top_k or sampling.min_p
    if sampling.temperature <= 0 or cut or penalised:
        raise FailedPreconditionError(
            f"group {group.group_id} was not drawn from the policy's whole distribution: train on groups with "
            "temperature above 0, top_p 1, top_k 0, min_p 0 and no repetition penalty",
            reason="DISTORTED_SAMPLING",
        )


def select_by_accuracy(
    groups: Sequence[buffer_pb2.ReadGroupsResponse], structural: StructuralFilter | None, malformed: Malformed
) -> Selection:
    """Structural filter first, then R = accuracy alone; what is refused is dropped, or counts as incorrect."""
    kept: list[Response] = []
    defects: Counter[Defect] = Counter()
    usable = [(item.group, scored) for item in groups for scored in item.trajectories if is_usable(scored)]
    for group, scored in usable:
        defect = structural.defect(scored.trajectory) if structural else None
        if defect is None:
            kept.append(Response(group, scored, 1.0 if _is_correct(scored) else -1.0))
            continue
        defects[defect] += 1
        # A serialized block was decoded causally: no forward pass of ours has the logits that the engine saw.
        if malformed is Malformed.INCORRECT and defect is not Defect.SERIALIZED:
            kept.append(Response(group, scored, -1.0))
    return _selection(groups, usable, kept, defects)


def select_by_reward(groups: Sequence[buffer_pb2.ReadGroupsResponse], options: StageOptions) -> Selection:
    """All that was decoded and judged, with the buffer's reward less the soft overlong penalty."""
    usable = [(item.group, scored) for item in groups for scored in item.trajectories if is_usable(scored)]
    kept = [Response(group, scored, _reward(group, scored, options)) for group, scored in usable]
    return _selection(groups, usable, kept, Counter())


def _reward(group: buffer_pb2.Group, scored: trajectory_pb2.ScoredTrajectory, options: StageOptions) -> float:
    limit = group.decoding.limits.max_tokens
    if options.overlong_buffer_tokens > limit:
        raise InvalidArgumentError(
            f"group {group.group_id} has max_tokens {limit}, less than overlong_buffer_tokens: "
            "decode under a limit above the buffer"
        )
    length = len(scored.trajectory.token_ids) - scored.trajectory.prompt_length
    penalty = overlong_penalty(length, limit, options.overlong_buffer_tokens)
    return scored.score.reward + options.overlong_penalty * penalty


def _is_correct(scored: trajectory_pb2.ScoredTrajectory) -> bool:
    return scored.score.verdict == trajectory_pb2.VERDICT_KIND_CORRECT


def _selection(
    groups: Sequence[buffer_pb2.ReadGroupsResponse],
    usable: Sequence[tuple[buffer_pb2.Group, trajectory_pb2.ScoredTrajectory]],
    kept: Sequence[Response],
    defects: Counter[Defect],
) -> Selection:
    total = sum(len(item.trajectories) for item in groups)
    correct = sum(_is_correct(scored) for _, scored in usable)
    return Selection(tuple(kept), total, len(usable), correct, defects)


@dataclass(frozen=True)
class ReinforcementStep:
    """All that one step needs besides its groups."""

    policy: Policy
    ref: policy_pb2.PolicyRef
    objective: "learner_pb2.Objective.ValueType"
    visibility: "sampling_pb2.Visibility.ValueType"
    options: StageOptions
    step: int
    world: World

    def run(self, groups: Sequence[buffer_pb2.ReadGroupsResponse], observe: Observer) -> dict[str, float]:
        """Trains on the groups; the policy and its optimiser are changed in place.

        Returns:
            Metrics by name.

        Raises:
            FailedPreconditionError: nothing is kept (`NOTHING_KEPT`), or the groups are not this step's to train on.
        """
        selection = self._select(groups)
        self._require_trainable(selection)
        rows = self._rows(selection)
        rate = learning_rate_at(self.step, self.options, self.options.total_steps)
        self.policy.model.train()
        summaries, norms = [], []
        for mini_batch in self._mini_batches(rows, selection):
            loss_of = self._rules.loss(self.options, max(1, trained_tokens(mini_batch)))
            summaries.append(
                accumulate_gradient(
                    self.policy.scorer, mini_batch, loss_of, self.options, observe=observe, world=self.world
                )
            )
            self._require_same_policy(summaries[0].drift)
            norms.append(self._update(rate))
        return {**selection.metrics(), **_summary_metrics(summaries), "grad_norm": max(norms), "learning_rate": rate}

    @property
    def _rules(self) -> Rules:
        return RULES[self.objective]

    def _select(self, groups: Sequence[buffer_pb2.ReadGroupsResponse]) -> Selection:
        for item in groups:
            require_whole_distribution(item.group, self._rules)
        if not self._rules.by_accuracy:
            return select_by_reward(groups, self.options)
        parallel = self.visibility == sampling_pb2.VISIBILITY_PARALLEL
        structural = self.policy.structural_filter() if parallel else None
        return select_by_accuracy(groups, structural, self.options.malformed)

    def _require_trainable(self, selection: Selection) -> None:
        trajectories = [response.scored.trajectory for response in selection.kept]
        require_policy(trajectories, self.ref)
        require_visibility(trajectories, self.visibility)
        if not selection.kept:
            counts = ", ".join(f"{count} {defect}" for defect, count in selection.defects.most_common())
            raise FailedPreconditionError(
                f"none of {selection.total} trajectories is left to train on ({counts or 'none was judged'}): "
                "train the form before this stage, or set malformed to incorrect",
                reason="NOTHING_KEPT",
                metadata={str(defect): str(count) for defect, count in selection.defects.items()},
            )

    def _require_same_policy(self, drift: Drift) -> None:
        """Stops before an update by log-probabilities of another policy than the one that decoded."""
        bound = self.options.max_log_prob_drift_mean
        if bound is None or drift.mean <= bound:
            return
        self.policy.optimizer.zero_grad()
        raise FailedPreconditionError(
            f"the learner's log-probabilities are {drift.mean:.3g} nats from the engine's on average, at most "
            f"{drift.largest:.3g}, past the bound of {bound:g}: they do not compute the same policy. Compare their "
            "dtype and what the engine serves, or raise guard.max_log_prob_drift_mean in a new run",
            reason="LOG_PROB_DRIFT",
            metadata={name: f"{value:.6g}" for name, value in drift.metrics().items()},
        )

    def _rows(self, selection: Selection) -> list[Row]:
        rewards = [response.reward for response in selection.kept]
        names = [response.group.group_id for response in selection.kept]
        advantages = self._rules.advantages(rewards, names, self.options.advantage_epsilon)
        return [
            self._row(response, float(advantage))
            for response, advantage in zip(selection.kept, advantages, strict=True)
        ]

    def _row(self, response: Response, advantage: float) -> Row:
        row = row_of_trajectory(response.scored.trajectory, self.policy.tags, self.policy.vocabulary_size, advantage)
        return replace(row, temperature=response.group.decoding.sampling.temperature)

    def _mini_batches(self, rows: Sequence[Row], selection: Selection) -> Iterator[list[Row]]:
        """Whole groups, dealt out in an order that the seed and the step fix."""
        if self._rules.strictly_on_policy:
            yield self._rules.weigh(rows)
            return
        by_group: dict[str, list[Row]] = {}
        for row, response in zip(rows, selection.kept, strict=True):
            by_group.setdefault(response.group.group_id, []).append(row)
        names = sorted(by_group)
        order = np.random.default_rng([self.options.seed, self.step]).permutation(len(names))
        for part in np.array_split(order, min(self.options.minibatches_per_step, len(names))):
            yield self._rules.weigh([row for index in part for row in by_group[names[index]]])

    def _update(self, rate: float) -> float:
        return apply_update(self.policy.model.parameters(), self.policy.optimizer, rate, self.options.max_grad_norm)


def _summary_metrics(summaries: Sequence[GradientSummary]) -> Mapping[str, float]:
    """Means over the step's tokens. Drift is that of the first mini-batch, before the policy has moved."""
    tokens = sum(summary.tokens for summary in summaries)
    names = {name for summary in summaries for name in summary.sums}
    means = {name: sum(summary.sums[name] for summary in summaries) / max(1, tokens) for name in names}
    return {
        **means,
        "loss": sum(summary.loss for summary in summaries) / len(summaries),
        **summaries[0].drift.metrics(),
        "tokens": tokens,
        "computed_tokens": sum(summary.computed_tokens for summary in summaries),
        "optimizer_steps": len(summaries),
    }
