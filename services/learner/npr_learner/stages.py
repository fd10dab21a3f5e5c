"""The stages of all runs as one process of a world holds them: one in memory, the rest in their checkpoints.

Every process of a world calls the same methods with the same arguments; the first one alone writes.

Order of durability: the checkpoint holds a step's weights, its metrics and the groups that it used; only then is its
policy published, only then are its groups acknowledged, only then is its answer stored. What a crash leaves undone is
done, idempotently, from the checkpoint (`LearnerServicer`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from npr.buffer.v1 import buffer_pb2
from npr.learner.v1 import learner_pb2
from npr.types.v1 import policy_pb2
from npr_common.errors import FailedPreconditionError
from npr_common.policy_store import PolicyStore
from npr_learner.checkpoint import CheckpointStore, Saving
from npr_learner.fine_tuning import FineTuneSource, FineTuning, RowMaker
from npr_learner.frontiers import not_started
from npr_learner.gradient import Observer
from npr_learner.records import FineTuneProgress, GroupsUsed, StageKey, StageRecord, StageSpec, StepRecord
from npr_learner.reinforcement import ReinforcementStep
from npr_learner.sources import load_model, locate
from npr_learner.stage import Stage, restore_stage, start_stage
from npr_learner.world import World


class Stages:
    """Starts, finds, trains and publishes stages."""

    def __init__(self, policies: PolicyStore, checkpoints: CheckpointStore, cache_dir: Path, world: World) -> None:
        self._policies = policies
        self._checkpoints = checkpoints
        self._cache_dir = cache_dir
        self._world = world
        self._current: Stage | None = None
        self._saving: Saving | None = None

    def open(self, key: StageKey) -> StageRecord:
        """The stage's frontier, with its weights in memory.

        Raises:
            NotFoundError: it was never started.
            DataLossError: its checkpoint is corrupt.
        """
        return self._open(key).record

    def start(self, spec: StageSpec, source: learner_pb2.ModelSource) -> StageRecord:
        """The stage's frontier; it is made from its source unless it exists.

        Raises:
            FailedPreconditionError: it exists and was started otherwise.
        """
        stage = self._find(spec.key) or self._create(spec, source)
        if stage.record.spec != spec:
            raise FailedPreconditionError(
                f"stage {spec.key} was started with other options: keep them, or start a new run",
                reason="STAGE_DIFFERS",
            )
        return stage.record

    def train(
        self,
        key: StageKey,
        ref: policy_pb2.PolicyRef,
        groups: Sequence[buffer_pb2.ReadGroupsResponse],
        *,
        consumer: str,
        observe: Observer,
    ) -> StageRecord:
        """Does the stage's next step and makes it durable; `ref` is the policy it starts from."""
        started, stage = monotonic(), self._open(key)
        record, spec = stage.record, stage.record.spec
        step = ReinforcementStep(
            stage.policy, ref, spec.objective_value, spec.visibility_value, spec.options, record.next_step, self._world
        )
        with self._dropped_on_failure():
            metrics = {**step.run(groups, observe), "seconds": monotonic() - started}
            used = (GroupsUsed(policy_version=ref.version, group_ids=tuple(item.group.group_id for item in groups)),)
            last = StepRecord(step=record.next_step, metrics=metrics, consumer=consumer, used=used)
            self._advance(stage, record, last, serial=record.serial + 1)
        return stage.record

    def fine_tune(self, key: StageKey, source: FineTuneSource, consumer: str, observe: Observer) -> StageRecord:
        """Fine-tunes from where the stage stands to the end, and makes it durable."""
        stage = self._open(key)
        record = stage.record
        data = source.data(RowMaker(stage.policy, record.spec.visibility_value))
        tuning = FineTuning(stage.policy, record.spec.options, data.rows, self._world)

        def save(progress: FineTuneProgress) -> None:
            stage.record = record.model_copy(update={"serial": progress.updates, "fine_tune": progress})
            self._begin_save(stage)

        def observe_and_finish(done: int, total: int, metrics: Mapping[str, float]) -> None:
            if self._saving is not None and self._saving.is_written():
                self._finish_save()
            observe(done, total, metrics)

        with self._dropped_on_failure():
            progress = tuning.run(record.fine_tune or tuning.begin(), save, observe_and_finish)
            metrics = {**progress.metrics(), **data.metrics()}
            last = StepRecord(step=0, metrics=metrics, consumer=consumer, used=data.used)
            done = record.model_copy(update={"fine_tune": progress})
            self._advance(stage, done, last, serial=progress.total_updates)
        return stage.record

    def publish(self, key: StageKey) -> policy_pb2.PolicyRef:
        """Publishes the weights of the stage's frontier. Idempotent."""
        stage = self._open(key)
        model = stage.whole_model()
        return self._world.on_first(lambda: stage.publish(model, self._policies), "the publishing of a policy")

    def _find(self, key: StageKey) -> Stage | None:
        """The stage at its frontier, None where it was never started. Raises DataLossError for a corrupt checkpoint."""
        if self._current is not None and self._current.record.spec.key == key:
            return self._current
        self._current = None
        checkpoint = self._checkpoints.load(key, self._world)
        if checkpoint is not None:
            self._current = restore_stage(checkpoint, self._world)
        return self._current

    def _open(self, key: StageKey) -> Stage:
        stage = self._find(key)
        if stage is None:
            raise not_started(key)
        return stage

    def _create(self, spec: StageSpec, source: learner_pb2.ModelSource) -> Stage:
        loaded = load_model(locate(source, self._policies, self._cache_dir))
        newest = self._policies.latest(spec.key.run_id)
        version = 0 if newest is None else newest.version + 1
        stage = start_stage(spec, loaded, version, source.policy.digest, self._world)
        self._save(stage)
        self._current = stage
        return stage

    def _advance(self, stage: Stage, record: StageRecord, last: StepRecord, serial: int) -> None:
        frontier = {"serial": serial, "next_step": last.step + 1, "policy_version": record.policy_version + 1}
        stage.record = record.model_copy(update={**frontier, "last_step": last})
        self._save(stage)

    def _save(self, stage: Stage) -> None:
        """Makes the stage's frontier durable."""
        self._begin_save(stage)
        self._finish_save()

    def _begin_save(self, stage: Stage) -> None:
        """As it is now, while training goes on; the one before is durable by then."""
        self._finish_save()
        self._saving = self._checkpoints.begin(stage.record, stage.tensors(), stage.base, self._world)

    def _finish_save(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            self._checkpoints.finish(saving)

    @contextmanager
    def _dropped_on_failure(self) -> Iterator[None]:
        """Whatever goes wrong, the weights in memory are no frontier's any more: the checkpoint's are."""
        current, self._current = self._current, None
        try:
            yield
        finally:
            if self._saving is not None:
                self._saving.drop()
                self._saving = None
        self._current = current
