"""What a checkpoint says besides its tensors. All records are immutable and refuse unknown keys."""

from pydantic import BaseModel, ConfigDict

from npr.learner.v1 import learner_pb2
from npr.types.v1 import sampling_pb2
from npr_learner.options import StageOptions


class Record(BaseModel):
    """A record on disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StageKey(Record):
    """Names a stage."""

    run_id: str
    stage: str

    def __str__(self) -> str:
        return f"{self.run_id}/{self.stage}"


class StageSpec(Record):
    """What a stage was started with; it never changes. Enums are their proto numbers."""

    key: StageKey
    objective: int
    visibility: int
    dialect: str
    add_tag_tokens: bool
    options: StageOptions

    @property
    def objective_value(self) -> "learner_pb2.Objective.ValueType":
        """The objective as the contract's enum."""
        return learner_pb2.Objective.ValueType(self.objective)

    @property
    def visibility_value(self) -> "sampling_pb2.Visibility.ValueType":
        """The attention rule that the stage trains under, as the contract's enum."""
        return sampling_pb2.Visibility.ValueType(self.visibility)


class FineTuneProgress(Record):
    """How far fine-tuning has come, and what it has measured so far."""

    data_digest: str
    total_updates: int
    updates: int = 0
    trained_tokens: int = 0
    computed_tokens: int = 0
    nll_sum: float = 0.0
    entropy_sum: float = 0.0
    last_loss: float = 0.0
    last_grad_norm: float = 0.0
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Means per trained token over all updates."""
        tokens = max(1, self.trained_tokens)
        return {
            "loss": self.nll_sum / tokens,
            "last_loss": self.last_loss,
            "entropy": self.entropy_sum / tokens,
            "grad_norm": self.last_grad_norm,
            "updates": self.updates,
            "tokens": self.trained_tokens,
            "computed_tokens": self.computed_tokens,
            "seconds": self.seconds,
        }


class GroupsUsed(Record):
    """Groups whose trajectories are of one policy version, to be acknowledged together."""

    policy_version: int
    group_ids: tuple[str, ...]


class StepRecord(Record):
    """What a step did, and what is to be acknowledged for it once its policy is published."""

    step: int
    metrics: dict[str, float]
    consumer: str
    used: tuple[GroupsUsed, ...]


class StageRecord(Record):
    """A checkpoint's frontier.

    Attributes:
        serial: orders the checkpoints of a stage.
        next_step: the next step to do.
        policy_version: version under which this checkpoint's weights are (to be) published; while fine-tuning is on
            its way, that of the weights it started from.
        parent_digest: of the policy that the stage started from, empty where that was a model.
        last_step: the step that led to these weights; None at the start and while fine-tuning is on its way.
        fine_tune: set from fine-tuning's first checkpoint on.
    """

    spec: StageSpec
    serial: int
    next_step: int
    policy_version: int
    parent_digest: str
    last_step: StepRecord | None = None
    fine_tune: FineTuneProgress | None = None

    @property
    def fine_tuned(self) -> bool:
        """Whether fine-tuning is done."""
        return self.fine_tune is not None and self.fine_tune.updates == self.fine_tune.total_updates
