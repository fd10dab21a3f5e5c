"""What a stage works with: the recipe, the problems, the journal, and the two services."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from npr.types.v1 import prompt_pb2
from npr_controller.clients import BufferClient, LearnerClient
from npr_controller.datasets import Problem, ProblemSet, ProblemStream, open_source
from npr_controller.recipe import Recipe
from npr_controller.state.journal import Journal


@dataclass(frozen=True)
class Problems:
    """The recipe's data, opened."""

    train: ProblemSet | None
    test: Mapping[str, ProblemSet]

    @classmethod
    def open(cls, recipe: Recipe) -> "Problems":
        """Opens every source; reads files, so keep it off the event loop. Raises what `open_source` raises."""
        train = open_source(recipe.data.train) if recipe.data.train is not None else None
        return cls(train, {name: open_source(source) for name, source in recipe.data.test.items()})


@dataclass(frozen=True)
class Limits:
    """How long a run waits before it says that it can't go on."""

    stall_seconds: float = 600.0


@dataclass(frozen=True)
class RunContext:
    """One run, as its stages see it."""

    recipe: Recipe
    problems: Problems
    journal: Journal
    buffer: BufferClient
    learner: LearnerClient
    limits: Limits = field(default_factory=Limits)

    @property
    def run_id(self) -> str:
        """The run; also its policy line."""
        return self.journal.run.run_id

    def stream(self, stage: str) -> ProblemStream:
        """The order in which a stage meets the training problems."""
        assert self.problems.train is not None, "a recipe with stages that roll out names its training problems"
        return ProblemStream(self.problems.train, self.recipe.seed, stage)

    def prompt(self, problem: Problem) -> prompt_pb2.Prompt:
        """A problem in the recipe's words."""
        return prompt_pb2.Prompt(
            prompt_id=problem.problem_id,
            messages=self.recipe.prompt.messages(problem.text),
            gold=problem.gold,
            verifier=problem.verifier,
            metadata=dict(problem.metadata),
        )


def named_groups(prefix: str, problems: Sequence[Problem]) -> list[tuple[str, Problem]]:
    """Group ids for problems: the prefix and the place in the list."""
    return [(f"{prefix}-{place}", problem) for place, problem in enumerate(problems)]
