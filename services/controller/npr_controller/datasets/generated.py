"""Problems that are made, not stored: the bundled multi-part task, and reasoning-gym's families."""

from dataclasses import dataclass
from typing import Any

from npr_common.rpc import InvalidArgumentError, NotFoundError
from npr_common.tasks import MultipartTask
from npr_controller.datasets.problem import Problem
from npr_controller.recipe import MultipartSource, ReasoningGymSource


@dataclass(frozen=True)
class MultipartProblems:
    """The first `count` problems of a split, made when they are asked for."""

    source: MultipartSource
    task: MultipartTask

    def __len__(self) -> int:
        return self.source.count

    def __getitem__(self, index: int, /) -> Problem:
        if not 0 <= index < self.source.count:
            raise IndexError(index)
        made = self.task.problem(index, self.source.split)
        return Problem(made.problem_id, made.prompt_text, made.gold, self.source.verifier, made.metadata)


def open_multipart(source: MultipartSource) -> MultipartProblems:
    """The bundled task. Raises `InvalidArgumentError` when its ranges don't fit."""
    try:
        task = MultipartTask(families=source.families, parts=source.parts)
    except ValueError as error:
        raise InvalidArgumentError(f"multipart: {error}", reason="BAD_DATA_OPTIONS") from error
    return MultipartProblems(source, task)


@dataclass(frozen=True)
class GymProblems:
    """A procedural family; problem i depends on the source's seed and i alone."""

    source: ReasoningGymSource
    family: Any

    def __len__(self) -> int:
        return self.source.count

    def __getitem__(self, index: int, /) -> Problem:
        if not 0 <= index < self.source.count:
            raise IndexError(index)
        made = self.family[index]
        name = f"{self.source.family}/{self.source.seed}/{index}"
        labels = {"task": "reasoning_gym", "family": self.source.family}
        return Problem(name, made["question"], str(made["answer"]), self.source.verifier, labels)


def open_gym(source: ReasoningGymSource) -> GymProblems:
    """A family by name. `NotFoundError` for an unknown one, `InvalidArgumentError` for options it doesn't take."""
    import reasoning_gym  # noqa: PLC0415 - it takes seconds, which only recipes with such a source shall pay

    if source.family not in reasoning_gym.factory.DATASETS:
        raise NotFoundError(
            f"reasoning-gym has no family {source.family!r}; its gallery lists them", reason="DATA_NOT_FOUND"
        )
    try:
        family = reasoning_gym.create_dataset(source.family, size=source.count, seed=source.seed, **source.options)
    except (TypeError, ValueError, AssertionError) as error:
        raise InvalidArgumentError(f"reasoning-gym {source.family}: {error}", reason="BAD_DATA_OPTIONS") from error
    return GymProblems(source, family)
