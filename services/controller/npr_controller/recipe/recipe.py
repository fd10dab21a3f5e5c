"""One run as one YAML file: model, data, stages, evaluation, guard rails.

Invariants: a recipe is immutable; unknown keys are errors; units stand in the names; the same recipe and seed ask for
the same prompts in the same order.
"""

from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Literal, Self

import yaml
from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from npr.types.v1 import prompt_pb2, sampling_pb2
from npr_common.rpc import InvalidArgumentError
from npr_controller.recipe.base import RecipePart
from npr_controller.recipe.decoding import Decoding
from npr_controller.recipe.policy import PublishedPolicy
from npr_controller.recipe.sources import Data
from npr_controller.recipe.stages import Stage

SEED_STAGE = "seed"


class WorkedExample(RecipePart):
    """A problem with its response, shown as two turns before the problem that is asked."""

    problem: str
    response: str


class PromptTemplate(RecipePart):
    """How a problem becomes a conversation; the policy's chat template turns it into tokens.

    Worked examples are part of the prompt: tags in them are plain text there and never open a block.
    """

    system: str | None = None
    examples: tuple[WorkedExample, ...] = ()
    user: str = "{problem}"

    @field_validator("user")
    @classmethod
    def _holds_the_problem(cls, user: str) -> str:
        if "{problem}" not in user:
            raise ValueError("must hold {problem}, which the problem's text replaces")
        return user

    def messages(self, problem: str) -> list[prompt_pb2.ChatMessage]:
        """The conversation about a problem. Braces of the problem's own text are left alone."""
        system = [("system", self.system)] if self.system is not None else []
        shown = [turn for example in self.examples for turn in self._turns(example)]
        turns = [*system, *shown, ("user", self._asked(problem))]
        return [prompt_pb2.ChatMessage(role=role, content=content) for role, content in turns]

    def _turns(self, example: WorkedExample) -> tuple[tuple[str, str], tuple[str, str]]:
        return ("user", self._asked(example.problem)), ("assistant", example.response)

    def _asked(self, problem: str) -> str:
        return self.user.replace("{problem}", problem)


class Evaluation(RecipePart):
    """Held-out evaluation of the seed and after every stage."""

    samples_per_problem: int = Field(default=1, ge=1, le=1024)
    pass_at: tuple[int, ...] = Field(default=(1,), description="k of the unbiased pass@k; at most the samples")
    bootstrap_resamples: int = Field(default=2000, ge=100)
    confidence: float = Field(default=0.95, gt=0, lt=1)
    decoding: Decoding | None = Field(default=None, description="unset: the recipe's")
    visibility: Literal["sequential", "parallel"] = Field(
        default="sequential", description="how the recipe's own model decodes; a stage's policy decodes its own way"
    )
    shown_trajectories: int = Field(default=3, ge=0, description="trajectories a stage shows in the report")

    @property
    def model_visibility(self) -> "sampling_pb2.Visibility.ValueType":
        """The wire form of `visibility`."""
        if self.visibility == "parallel":
            return sampling_pb2.VISIBILITY_PARALLEL
        return sampling_pb2.VISIBILITY_SEQUENTIAL

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if max(self.pass_at, default=1) > self.samples_per_problem:
            raise ValueError("pass_at: k can't exceed samples_per_problem")
        return self


class Guard(RecipePart):
    """Bounds past which a run stops with a report instead of going on in vain."""

    max_malformed_rate: float = Field(default=0.5, ge=0, le=1, description="of an NPR step's responses")
    malformed_steps: int = Field(default=3, ge=1, description="steps in a row past the bound that stop the run")
    min_forked_rate: float = Field(default=0.95, ge=0, le=1, description="parallel rate needed before stage 3")
    max_log_prob_drift_mean: float = Field(
        default=0.1, gt=0, description="nats between learner and engine on a step's tokens; past it none is learned"
    )


class Recipe(RecipePart):
    """A run of stages, or with no stage the evaluation of one model."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    notes: str = Field(default="", description="what a reader of the report must know about model and data")
    dialect: str = "npr"
    seed: int = Field(default=0, ge=0)
    model: str | None = Field(
        default=None, description="a folder, an fsspec URL, `bundled:NAME` or `package:MODULE/FILE`"
    )
    policy: PublishedPolicy | None = Field(default=None, description="a published policy instead of a model")
    prompt: PromptTemplate = PromptTemplate()
    data: Data
    decoding: Decoding = Decoding()
    stages: tuple[Stage, ...] = ()
    evaluation: Evaluation = Evaluation()
    guard: Guard = Guard()

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.model is None) == (self.policy is None):
            raise ValueError("name either a model or a policy")
        if self.stages and self.data.train is None and any(stage.kind != "multiverse" for stage in self.stages):
            raise ValueError("data.train: name the problems to learn from")
        counts = Counter((SEED_STAGE, *(stage.name for stage in self.stages)))
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ValueError(f"stages: the names must differ, and `seed` is taken: {', '.join(twice)}")
        return self


def parse_recipe(text: str) -> Recipe:
    """A recipe from YAML.

    Raises `InvalidArgumentError` with one violation a field; its message is one line that names the first ones.
    """
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidArgumentError(f"the recipe is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise InvalidArgumentError("the recipe is not a YAML mapping; see docs/recipes.md")
    try:
        return TypeAdapter(Recipe).validate_python(content)
    except ValidationError as error:
        violations = dict(_violation(detail) for detail in error.errors())
        told = "; ".join(f"{field}: {why}" for field, why in list(violations.items())[:3])
        more = f" (and {len(violations) - 3} more)" if len(violations) > 3 else ""
        raise InvalidArgumentError(
            f"the recipe doesn't validate: {told}{more}", reason="BAD_RECIPE", field_violations=violations
        ) from error


def _violation(detail: Any) -> tuple[str, str]:
    field = ".".join(str(part) for part in detail["loc"]) or "recipe"
    if detail["type"] == "extra_forbidden":
        *place, key = detail["loc"]
        meant = get_close_matches(str(key), sorted(_keys_at(place)), n=1, cutoff=0.7)
        return field, f"unknown key; {f'did you mean {meant[0]!r}? ' if meant else ''}docs/recipes.md lists the keys"
    return field, str(detail["msg"]).removeprefix("Value error, ")


def _keys_at(place: Sequence[int | str]) -> set[str]:
    """The keys that a recipe may have at a place, as pydantic names places: the kinds of parts stand in them too."""
    schema = Recipe.model_json_schema()
    parts = [schema]
    for step in place:
        parts = [inner for part in _resolved(parts, schema) for inner in _inner(part, step)]
    return {key for part in _resolved(parts, schema) for key in part.get("properties", {})}


def _resolved(parts: Sequence[Any], schema: Any) -> list[Any]:
    """The parts with references followed and unions as their members, besides the unions themselves."""
    resolved = []
    for part in parts:
        if "$ref" in part:
            resolved += _resolved([schema["$defs"][part["$ref"].rpartition("/")[2]]], schema)
        elif "anyOf" in part:
            resolved += _resolved(part["anyOf"], schema)
        else:
            resolved.append(part)
    return resolved


def _inner(part: Any, step: int | str) -> list[Any]:
    """What is inside of a part by an item's number, a union member's kind, or a key."""
    if isinstance(step, int):
        return [part["items"]] if "items" in part else []
    kinds = part.get("discriminator", {}).get("mapping", {})
    if step in kinds:
        return [{"$ref": kinds[step]}]
    keys = part.get("properties", {})
    return [keys[step]] if step in keys else [part["additionalProperties"]] if "additionalProperties" in part else []
