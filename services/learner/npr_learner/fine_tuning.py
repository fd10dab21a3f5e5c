"""Parallel supervised fine-tuning: which rows, in which order, and the loop that can stop and go on.

Invariants:
- The plan of updates is a pure function of the rows and the options, so a resumed run does what is left of the same.
- An update is a random set of rows of about `tokens_per_update` tokens; every row is in one update an epoch.
- One normaliser serves all updates: the trained tokens of an average one.
- What an interrupted run had measured is in `FineTuneProgress`: its end result is that of a run never stopped.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from npr.buffer.v1 import buffer_pb2
from npr.types.v1 import prompt_pb2, sampling_pb2, trajectory_pb2
from npr_common.errors import FailedPreconditionError, NotFoundError
from npr_common.prompts import encode_messages, encode_prompt
from npr_learner.batch import Batch
from npr_learner.canonical import ResponseEncoder
from npr_learner.datasets import Example, read_examples
from npr_learner.gradient import GradientSummary, Observer, accumulate_gradient, trained_tokens
from npr_learner.objectives import LossTerms, sft_loss
from npr_learner.optim import apply_update, learning_rate_at
from npr_learner.options import StageOptions
from npr_learner.policy import Policy
from npr_learner.records import FineTuneProgress, GroupsUsed
from npr_learner.row import Row, make_row, row_of_trajectory
from npr_learner.world import World


@dataclass(frozen=True)
class RowMaker:
    """Makes rows of a stage from what it is given; None stands for a response that can't be trained on."""

    policy: Policy
    visibility: "sampling_pb2.Visibility.ValueType"

    @property
    def _parallel(self) -> bool:
        return self.visibility == sampling_pb2.VISIBILITY_PARALLEL

    def of_trajectory(self, group: buffer_pb2.Group, trajectory: trajectory_pb2.Trajectory) -> Row | None:
        """A trajectory decoded in parallel is taken as it is; one that was decoded as plain text is encoded anew."""
        if trajectory.outcome != trajectory_pb2.OUTCOME_COMPLETED:
            return None
        if self._parallel and trajectory.visibility == sampling_pb2.VISIBILITY_PARALLEL:
            if self.policy.structural_filter().defect(trajectory) is not None:
                return None
            return row_of_trajectory(trajectory, self.policy.tags, self.policy.vocabulary_size)
        return self._of_text(encode_prompt(self.policy.tokenizer, group.prompt), trajectory.response_text)

    def of_example(self, example: Example) -> Row | None:
        """A public trajectory."""
        message = prompt_pb2.ChatMessage(role="user", content=example.prompt)
        return self._of_text(encode_messages(self.policy.tokenizer, [message]), example.response)

    def _of_text(self, prompt_ids: list[int], response_text: str) -> Row | None:
        encoder = ResponseEncoder(self.policy.tokenizer, self.policy.dialect, self._parallel)
        response = encoder.encode(response_text)
        if response is None:
            return None
        tags = self.policy.require_tags() if self._parallel else None
        return make_row([*prompt_ids, *response.ids], response.forced, None, tags)


@dataclass(frozen=True)
class FineTuneData:
    """What a stage is fine-tuned on.

    Attributes:
        rows: the responses that can be trained on.
        total: responses given.
        used: the groups to acknowledge in the end.
    """

    rows: Sequence[Row]
    total: int
    used: tuple[GroupsUsed, ...] = ()

    def metrics(self) -> dict[str, float]:
        """How many responses there were, and which share of them is trained on."""
        return {"trajectories": self.total, "kept_fraction": len(self.rows) / max(1, self.total)}


class FineTuneSource(Protocol):
    """Where the responses of a fine-tuning come from."""

    def data(self, maker: RowMaker) -> FineTuneData:
        """The responses as rows of a stage."""
        ...


@dataclass(frozen=True)
class GroupSource:
    """The named trajectories of the groups, in the groups' order; `used_ids` are the groups to acknowledge."""

    groups: Sequence[buffer_pb2.ReadGroupsResponse]
    trajectory_ids: frozenset[str]
    used_ids: frozenset[str]

    def data(self, maker: RowMaker) -> FineTuneData:
        """Raises NotFoundError where a trajectory is in none of the groups."""
        chosen = [
            (item.group, scored.trajectory)
            for item in self.groups
            for scored in item.trajectories
            if scored.trajectory.trajectory_id in self.trajectory_ids
        ]
        missing = self.trajectory_ids - {trajectory.trajectory_id for _, trajectory in chosen}
        if missing:
            raise NotFoundError(f"trajectory {min(missing)} is not in the groups: {len(missing)} are missing in all")
        rows = [maker.of_trajectory(group, trajectory) for group, trajectory in chosen]
        return FineTuneData([row for row in rows if row is not None], len(rows), _used(self.groups, self.used_ids))


@dataclass(frozen=True)
class DatasetSource:
    """The public trajectories of a data set."""

    url: str

    def data(self, maker: RowMaker) -> FineTuneData:
        """Raises what `read_examples` does."""
        rows = [maker.of_example(example) for example in read_examples(self.url)]
        return FineTuneData([row for row in rows if row is not None], len(rows))


def _used(groups: Sequence[buffer_pb2.ReadGroupsResponse], group_ids: frozenset[str]) -> tuple[GroupsUsed, ...]:
    """The groups by the policy version that made them: the buffer acknowledges one version at a time."""
    by_version: dict[int, list[str]] = {}
    for item in groups:
        if item.group.group_id in group_ids:
            version = item.trajectories[0].trajectory.policy.version if item.trajectories else item.group.policy.version
            by_version.setdefault(version, []).append(item.group.group_id)
    return tuple(
        GroupsUsed(policy_version=version, group_ids=tuple(ids)) for version, ids in sorted(by_version.items())
    )


def plan_updates(lengths: Sequence[int], options: StageOptions) -> list[list[int]]:
    """The row indices of every update of all epochs, in order."""
    plan: list[list[int]] = []
    for epoch in range(options.epochs):
        order = np.random.default_rng([options.seed, epoch]).permutation(len(lengths))
        plan += _fill(order.tolist(), lengths, options.tokens_per_update)
    return plan


def _fill(order: Iterable[int], lengths: Sequence[int], capacity: int) -> Iterator[list[int]]:
    update: list[int] = []
    tokens = 0
    for index in order:
        if update and tokens + lengths[index] > capacity:
            yield update
            update, tokens = [], 0
        update.append(index)
        tokens += lengths[index]
    if update:
        yield update


def digest_of(rows: Sequence[Row]) -> str:
    """Names the data, so that a resumed run can tell whether it is the same."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.token_ids.tobytes())
        digest.update(row.trained.tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class FineTuning:
    """The fine-tuning of one policy on given rows."""

    policy: Policy
    options: StageOptions
    rows: Sequence[Row]
    world: World

    def begin(self) -> FineTuneProgress:
        """Progress before the first update.

        Raises:
            FailedPreconditionError: no row is left to train on.
        """
        if not self.rows:
            raise FailedPreconditionError(
                "no response is left to fine-tune on: accept well-formed responses, or give a data set with blocks",
                reason="NOTHING_KEPT",
            )
        plan = plan_updates([len(row) for row in self.rows], self.options)
        return FineTuneProgress(total_updates=len(plan), data_digest=digest_of(self.rows))

    def run(
        self, progress: FineTuneProgress, save: Callable[[FineTuneProgress], None], observe: Observer
    ) -> FineTuneProgress:
        """Does the updates that are left; `save` is called every `checkpoint_every_steps` but not after the last.

        Raises:
            FailedPreconditionError: `progress` is of other data.
        """
        self._require_same_data(progress)
        plan = plan_updates([len(row) for row in self.rows], self.options)
        normalizer = sum(trained_tokens([self.rows[i] for i in update]) for update in plan) / len(plan)
        self.policy.model.train()
        for update in range(progress.updates, len(plan)):
            progress = self._update(progress, [self.rows[i] for i in plan[update]], normalizer)
            if progress.updates < len(plan) and progress.updates % self.options.checkpoint_every_steps == 0:
                save(progress)
            observe(progress.updates, len(plan), {"loss": progress.last_loss, "grad_norm": progress.last_grad_norm})
        return progress

    def _require_same_data(self, progress: FineTuneProgress) -> None:
        if progress.data_digest != digest_of(self.rows):
            raise FailedPreconditionError(
                "these are not the trajectories that this fine-tuning began with: give the same, or start a new run",
                reason="DATA_CHANGED",
            )

    def _update(self, progress: FineTuneProgress, rows: Sequence[Row], normalizer: float) -> FineTuneProgress:
        started = time.monotonic()
        loss_of = partial(_sft, normalizer=max(1.0, normalizer))
        summary = accumulate_gradient(
            self.policy.scorer, rows, loss_of, self.options, observe=lambda *_: None, world=self.world
        )
        rate = learning_rate_at(progress.updates, self.options, progress.total_updates)
        model, optimizer = self.policy.model, self.policy.optimizer
        norm = apply_update(model.parameters(), optimizer, rate, self.options.max_grad_norm)
        return _advanced(progress, summary, norm, time.monotonic() - started)


def _sft(log_probs_N: torch.Tensor, batch: Batch, *, normalizer: float) -> LossTerms:
    return sft_loss(log_probs_N, normalizer)


def _advanced(
    progress: FineTuneProgress, summary: GradientSummary, grad_norm: float, seconds: float
) -> FineTuneProgress:
    return progress.model_copy(
        update={
            "updates": progress.updates + 1,
            "trained_tokens": progress.trained_tokens + summary.tokens,
            "computed_tokens": progress.computed_tokens + summary.computed_tokens,
            "nll_sum": progress.nll_sum + summary.sums["nll"],
            "entropy_sum": progress.entropy_sum + summary.sums["entropy"],
            "last_loss": summary.mean("nll"),
            "last_grad_norm": grad_norm,
            "seconds": progress.seconds + seconds,
        }
    )
