"""The stages of all runs: one in memory, the rest in their checkpoints. Everything here runs in the worker thread.

Order of durability: the checkpoint holds a step's weights, its metrics and the groups that it used; only then is its
policy published, only then are its groups acknowledged, only then is its answer stored. What a crash leaves undone is
done, idempotently, from the checkpoint (`LearnerService`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import torch

from npr.buffer.v1 import buffer_pb2
from npr.learner.v1 import learner_pb2
from npr.types.v1 import policy_pb2, sampling_pb2
from npr_common.errors import FailedPreconditionError, NotFoundError
from npr_common.policy_store import PolicyStore
from npr_learner.checkpoint import CheckpointStore
from npr_learner.fine_tuning import FineTuneData, FineTuning
from npr_learner.gradient import Observer
from npr_learner.records import FineTuneProgress, GroupsUsed, StageKey, StageRecord, StageSpec, StepRecord
from npr_learner.reinforcement import ReinforcementStep
from npr_learner.sources import load_model, locate
from npr_learner.stage import Stage, restore_stage, start_stage

_START = "start"


class Stages:
    """Starts, finds, trains and publishes stages."""

    def __init__(
        self, policies: PolicyStore, checkpoints: CheckpointStore, cache_dir: Path, device: torch.device
    ) -> None:
        self._policies = policies
        self._checkpoints = checkpoints
        self._cache_dir = cache_dir
        self._device = device
        self._current: Stage | None = None

    def find(self, key: StageKey) -> Stage | None:
        """The stage at its frontier, None where it was never started. Raises DataLossError for a corrupt checkpoint."""
        if self._current is not None and self._current.record.spec.key == key:
            return self._current
        self._current = None
        checkpoint = self._checkpoints.load(key)
        if checkpoint is not None:
            self._current = restore_stage(checkpoint, self._device)
        return self._current

    def open(self, key: StageKey) -> Stage:
        """The stage at its frontier. Raises NotFoundError where it was never started."""
        stage = self.find(key)
        if stage is None:
            raise NotFoundError(f"stage {key} was never started: call StartStage first", reason="STAGE_NOT_FOUND")
        return stage

    def record(self, key: StageKey) -> StageRecord:
        """The frontier alone, without loading weights. Raises NotFoundError where the stage was never started."""
        record = self._checkpoints.newest_record(key)
        if record is None:
            raise NotFoundError(f"stage {key} was never started: call StartStage first", reason="STAGE_NOT_FOUND")
        return record

    def start(self, spec: StageSpec, source: learner_pb2.ModelSource) -> Stage:
        """The stage, made from its source unless it exists.

        Raises:
            FailedPreconditionError: it exists and was started otherwise.
        """
        stage = self.find(spec.key)
        if stage is None:
            return self._create(spec, source)
        if stage.record.spec != spec:
            raise FailedPreconditionError(
                f"stage {spec.key} was started with other options: keep them, or start a new run",
                reason="STAGE_DIFFERS",
            )
        return stage

    def _create(self, spec: StageSpec, source: learner_pb2.ModelSource) -> Stage:
        loaded = load_model(locate(source, self._policies, self._cache_dir), self._device)
        newest = self._policies.latest(spec.key.run_id)
        version = 0 if newest is None else newest.version + 1
        stage = start_stage(spec, loaded, version, source.policy.digest)
        self._save(stage)
        self._current = stage
        return stage

    def train(
        self,
        stage: Stage,
        ref: policy_pb2.PolicyRef,
        groups: Sequence[buffer_pb2.ReadGroupsResponse],
        *,
        consumer: str,
        observe: Observer,
    ) -> None:
        """Does the stage's next step and makes it durable; `ref` is the policy it starts from."""
        started, record, spec = monotonic(), stage.record, stage.record.spec
        step = ReinforcementStep(
            stage.policy,
            ref,
            learner_pb2.Objective.ValueType(spec.objective),
            spec_visibility(spec),
            spec.options,
            record.next_step,
        )
        with self._dropped_on_failure():
            metrics = {**step.run(groups, observe), "seconds": monotonic() - started}
            used = (GroupsUsed(policy_version=ref.version, group_ids=tuple(item.group.group_id for item in groups)),)
            last = StepRecord(step=record.next_step, metrics=metrics, consumer=consumer, used=used)
            self._advance(stage, record, last, serial=record.serial + 1)

    def fine_tune(self, stage: Stage, data: FineTuneData, consumer: str, observe: Observer) -> None:
        """Fine-tunes from where the stage stands to the end, and makes it durable."""
        record = stage.record
        tuning = FineTuning(stage.policy, record.spec.options, data.rows)

        def save(progress: FineTuneProgress) -> None:
            stage.record = record.model_copy(update={"serial": progress.updates, "fine_tune": progress})
            self._save(stage)

        with self._dropped_on_failure():
            progress = tuning.run(record.fine_tune or tuning.begin(), save, observe)
            metrics = {**progress.metrics(), **data.metrics()}
            last = StepRecord(step=0, metrics=metrics, consumer=consumer, used=data.used)
            done = record.model_copy(update={"fine_tune": progress})
            self._advance(stage, done, last, serial=progress.total_updates)

    def publish(self, stage: Stage) -> policy_pb2.PolicyRef:
        """Publishes the stage's weights. Idempotent."""
        return stage.publish(self._policies)

    def answer(self, record: StageRecord) -> learner_pb2.StepResult | None:
        """The stored answer that belongs to a frontier: its policy, and its last step's metrics."""
        return self._checkpoints.result(record.spec.key, _name(record))

    def answer_of_step(self, key: StageKey, step: int) -> learner_pb2.StepResult:
        """The stored answer of a step that is done. Raises NotFoundError where it was deleted."""
        result = self._checkpoints.result(key, f"{step:08d}")
        if result is None:
            raise NotFoundError(f"the result of step {step} of {key} is gone: go on with the stage's next step")
        return result

    def store_answer(self, record: StageRecord, ref: policy_pb2.PolicyRef) -> learner_pb2.StepResult:
        """Stores what a step answers, once all else is done."""
        last = record.last_step
        result = learner_pb2.StepResult(step=last.step if last else 0, policy=ref, metrics=last.metrics if last else {})
        self._checkpoints.put_result(record.spec.key, _name(record), result)
        return result

    def _advance(self, stage: Stage, record: StageRecord, last: StepRecord, serial: int) -> None:
        frontier = {"serial": serial, "next_step": last.step + 1, "policy_version": record.policy_version + 1}
        stage.record = record.model_copy(update={**frontier, "last_step": last})
        self._save(stage)

    def _save(self, stage: Stage) -> None:
        self._checkpoints.save(stage.record, stage.tensors(), stage.base)

    @contextmanager
    def _dropped_on_failure(self) -> Iterator[None]:
        """Whatever goes wrong, the weights in memory are no frontier's any more: the checkpoint's are."""
        current, self._current = self._current, None
        yield
        self._current = current


def spec_visibility(spec: StageSpec) -> "sampling_pb2.Visibility.ValueType":
    """The attention rule that the stage trains under."""
    return sampling_pb2.Visibility.ValueType(spec.visibility)


def _name(record: StageRecord) -> str:
    return _START if record.last_step is None else f"{record.last_step.step:08d}"
