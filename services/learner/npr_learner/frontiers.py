"""What is known of a stage without its weights: its frontier, and the answers of its steps."""

from npr.learner.v1 import learner_pb2
from npr.types.v1 import policy_pb2
from npr_common.errors import NotFoundError
from npr_learner.checkpoint import CheckpointStore
from npr_learner.records import StageKey, StageRecord

_START = "start"


class Frontiers:
    """Reads frontiers, and keeps the answers that belong to them."""

    def __init__(self, checkpoints: CheckpointStore) -> None:
        self._checkpoints = checkpoints

    def record(self, key: StageKey) -> StageRecord:
        """The frontier. Raises NotFoundError where the stage was never started, DataLossError where it is corrupt."""
        record = self._checkpoints.newest_record(key)
        if record is None:
            raise not_started(key)
        return record

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


def not_started(key: StageKey) -> NotFoundError:
    """The error for a stage that has no frontier."""
    return NotFoundError(f"stage {key} was never started: call StartStage first", reason="STAGE_NOT_FOUND")


def _name(record: StageRecord) -> str:
    return _START if record.last_step is None else f"{record.last_step.step:08d}"
