"""The stages a recipe may name: the three of the method, and the baselines (SPEC section 5).

A stage knows three things the flow asks of every kind: how its own policy decodes (`visibility`), what the learner
optimises (`objective`), and which weights it starts from.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from npr.learner.v1 import learner_pb2
from npr.reward.v1 import reward_pb2
from npr.types.v1 import sampling_pb2
from npr_controller.recipe.base import RecipePart
from npr_controller.recipe.decoding import Decoding
from npr_controller.recipe.learning import FineTuning, PolicyGradient

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")]


class StartFrom(StrEnum):
    """Which weights a stage starts from."""

    MODEL = "model"
    PREVIOUS = "previous"


class Malformed(StrEnum):
    """What becomes of a malformed response in PAPO."""

    DROP = "drop"
    INCORRECT = "incorrect"


class ReinforcementStage(RecipePart):
    """What all stages of reinforcement learning share."""

    steps: int = Field(ge=1)
    prompts_per_step: int = Field(ge=1)
    samples_per_prompt: int = Field(ge=2, description="responses in a group")
    dynamic_sampling_rounds: int = Field(
        default=0, ge=0, description="how often groups without spread of rewards are replaced within a step"
    )
    decoding: Decoding | None = Field(default=None, description="unset: the recipe's")
    learning: PolicyGradient

    @property
    def adds_tag_tokens(self) -> bool:
        """RL keeps the vocabulary it is given."""
        return False


class ZeroStage(ReinforcementStage):
    """NPR-Zero: DAPO with the format-gated reward, decoded sequentially."""

    kind: Literal["zero"]
    name: Name = "zero"
    start_from: StartFrom = StartFrom.MODEL
    dynamic_sampling_rounds: int = Field(default=2, ge=0)

    @property
    def objective(self) -> "learner_pb2.Objective.ValueType":
        """DAPO."""
        return learner_pb2.OBJECTIVE_DAPO

    @property
    def visibility(self) -> "sampling_pb2.Visibility.ValueType":
        """Plain causal decoding."""
        return sampling_pb2.VISIBILITY_SEQUENTIAL

    @property
    def reward_rule(self) -> "reward_pb2.RewardRule.ValueType":
        """Accuracy is paid only where the format passes."""
        return reward_pb2.REWARD_RULE_FORMAT_GATED


class NprStage(ReinforcementStage):
    """NPR: PAPO on rollouts that really fork."""

    kind: Literal["npr"]
    name: Name = "npr"
    start_from: StartFrom = StartFrom.PREVIOUS
    malformed: Malformed = Malformed.DROP

    @property
    def objective(self) -> "learner_pb2.Objective.ValueType":
        """PAPO."""
        return learner_pb2.OBJECTIVE_PAPO

    @property
    def visibility(self) -> "sampling_pb2.Visibility.ValueType":
        """Fork, isolated steps, join."""
        return sampling_pb2.VISIBILITY_PARALLEL

    @property
    def reward_rule(self) -> "reward_pb2.RewardRule.ValueType":
        """Accuracy alone; the structural filter sees to the form."""
        return reward_pb2.REWARD_RULE_ACCURACY


class SequentialStage(ReinforcementStage):
    """The baseline of sequential RL: the same data and reward, plain causal decoding throughout."""

    kind: Literal["sequential"]
    name: Name = "sequential"
    start_from: StartFrom = StartFrom.PREVIOUS
    reward: Literal["accuracy", "format_gated"] = "accuracy"
    loss: Literal["dapo", "grpo"] = "dapo"

    @property
    def objective(self) -> "learner_pb2.Objective.ValueType":
        """DAPO, or GRPO: PAPO's structural filter has no meaning where no block is asked for."""
        return learner_pb2.OBJECTIVE_GRPO if self.loss == "grpo" else learner_pb2.OBJECTIVE_DAPO

    @property
    def visibility(self) -> "sampling_pb2.Visibility.ValueType":
        """Plain causal decoding."""
        return sampling_pb2.VISIBILITY_SEQUENTIAL

    @property
    def reward_rule(self) -> "reward_pb2.RewardRule.ValueType":
        """As the recipe says."""
        gated = self.reward == "format_gated"
        return reward_pb2.REWARD_RULE_FORMAT_GATED if gated else reward_pb2.REWARD_RULE_ACCURACY


class Keep(StrEnum):
    """Which accepted responses of a problem are learned from."""

    FIRST = "first"
    ALL = "all"


class FineTuningStage(RecipePart):
    """What all stages of supervised fine-tuning share: parallel visibility, the tags as single tokens."""

    start_from: StartFrom = StartFrom.MODEL
    learning: FineTuning

    @property
    def objective(self) -> "learner_pb2.Objective.ValueType":
        """Negative log-likelihood under the parallel mask and positions."""
        return learner_pb2.OBJECTIVE_SFT

    @property
    def visibility(self) -> "sampling_pb2.Visibility.ValueType":
        """Fork, isolated steps, join."""
        return sampling_pb2.VISIBILITY_PARALLEL

    @property
    def adds_tag_tokens(self) -> bool:
        """The engine forks on single tokens."""
        return True


class BetaStage(FineTuningStage):
    """NPR-Beta: rejection sampling from the previous stage's policy, then parallel SFT."""

    kind: Literal["beta"]
    name: Name = "beta"
    problems: int = Field(ge=1, description="training problems that are tried")
    tries: int = Field(default=8, ge=1, description="most responses sampled a problem")
    tries_per_round: int = Field(default=1, ge=1, description="responses of an unaccepted problem in one round")
    keep: Keep = Keep.FIRST
    min_accepted: int = Field(default=1, ge=1, description="fewer accepted responses fail the run")
    decoding: Decoding | None = Field(default=None, description="unset: the recipe's")


class MultiverseStage(FineTuningStage):
    """The Multiverse-style baseline: parallel SFT on given trajectories."""

    kind: Literal["multiverse"]
    name: Name = "multiverse"
    dataset_url: str = Field(description="JSONL with `prompt` and `response`; a path, an fsspec URL or `package:`")


AnyReinforcement = ZeroStage | NprStage | SequentialStage
AnyStage = AnyReinforcement | BetaStage | MultiverseStage
Stage = Annotated[AnyStage, Field(discriminator="kind")]
