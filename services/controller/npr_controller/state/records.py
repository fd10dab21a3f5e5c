"""What is durable about a run: its record and its events."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Self

from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import BaseModel, ConfigDict, Field

from npr.controller.v1 import controller_pb2


class RunState(StrEnum):
    """Where a run stands; see controller.proto."""

    RUNNING = "running"
    STOPPED = "stopped"
    COMPLETED = "completed"
    FAILED = "failed"


_WIRE = {
    RunState.RUNNING: controller_pb2.RUN_STATE_RUNNING,
    RunState.STOPPED: controller_pb2.RUN_STATE_STOPPED,
    RunState.COMPLETED: controller_pb2.RUN_STATE_COMPLETED,
    RunState.FAILED: controller_pb2.RUN_STATE_FAILED,
}


class RunRecord(BaseModel):
    """A run as it stands. `step` counts from 0 within the stage; times are seconds since the epoch."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    recipe: str
    recipe_yaml: str = ""
    state: RunState = RunState.RUNNING
    stage: str = ""
    phase: str = ""
    step: int = 0
    steps: int = 0
    error: str = ""
    created_at: float
    updated_at: float

    def fields(self) -> dict[str, str]:
        """The record as Redis holds it."""
        return {name: str(value) for name, value in self.model_dump(mode="json").items()}

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> Self:
        """The record from Redis."""
        return cls.model_validate(fields)

    def to_proto(self) -> controller_pb2.Run:
        """The wire form."""
        return controller_pb2.Run(
            run_id=self.run_id,
            recipe=self.recipe,
            state=_WIRE[self.state],
            stage=self.stage,
            phase=self.phase,
            step=self.step,
            steps=self.steps,
            error=self.error,
            created_at=_timestamp(self.created_at),
            updated_at=_timestamp(self.updated_at),
        )


class EventKind(StrEnum):
    """What an event tells."""

    CREATED = "created"
    STAGE_STARTED = "stage_started"
    ROLLOUT_PROGRESS = "rollout_progress"
    SAMPLING = "sampling"
    RESAMPLED = "resampled"
    TRAIN_PROGRESS = "train_progress"
    FINE_TUNING = "fine_tuning"
    STEP_FINISHED = "step_finished"
    WENT_BACK = "went_back"
    SAMPLED = "sampled"
    FINE_TUNED = "fine_tuned"
    EVALUATED = "evaluated"
    STOPPED = "stopped"
    RESUMED = "resumed"
    RUN_FINISHED = "run_finished"
    FAILED = "failed"


class EventRecord(BaseModel):
    """One event and the run after it (less its recipe). Its sequence number is its place in the log."""

    model_config = ConfigDict(frozen=True)

    at: float
    kind: EventKind
    run: RunRecord
    metrics: dict[str, float] = Field(default_factory=dict)
    message: str = ""

    def to_proto(self, sequence: int) -> controller_pb2.RunEvent:
        """The wire form."""
        return controller_pb2.RunEvent(
            sequence=sequence,
            at=_timestamp(self.at),
            run=self.run.to_proto(),
            kind=self.kind.value,
            metrics=self.metrics,
            message=self.message,
        )


def _timestamp(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMicroseconds(int(seconds * 1_000_000))
    return stamp
