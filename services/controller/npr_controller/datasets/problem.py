"""A problem as every source yields it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Problem:
    """One question, its right answer in the verifier's form, and free labels."""

    problem_id: str
    text: str
    gold: str
    verifier: str
    metadata: Mapping[str, str] = field(default_factory=dict)


class ProblemSet(Protocol):
    """A finite, ordered, repeatable set of problems: the same index is always the same problem."""

    def __len__(self) -> int:
        """How many there are; at least one."""

    def __getitem__(self, index: int, /) -> Problem:
        """The problem at `index`, from 0."""
