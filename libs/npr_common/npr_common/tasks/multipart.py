r"""Multi-part problems: a few independent expressions, then one reduction over their values.

    max of a=4*7+8, b=3*2+8, c=5*5+1

The parts need nothing of one another, so each is a branch of its own; the reduction is what a takeaway is for.

Invariants
- A problem is a pure function of the task's settings, the split and the index.
- The splits share no problem: a problem belongs to the split that the hash of its text falls in, and `problem`
  draws again until it falls in the one asked for.
- `gold` is the exact integer answer in decimal.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Final

from npr_common.dialects import Dialect
from npr_common.tags import Role


class Family(StrEnum):
    """The reduction that a problem asks for."""

    MAX = "max"
    MIN = "min"
    SUM = "sum"

    def reduce(self, values: Sequence[int]) -> int:
        """The answer to this family's question about `values` (at least one)."""
        return _REDUCTIONS[self](values)


_REDUCTIONS: Final[Mapping[Family, Callable[[Sequence[int]], int]]] = {
    Family.MAX: max,
    Family.MIN: min,
    Family.SUM: sum,
}


class Split(StrEnum):
    """Disjoint sets of problems."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


# Of every 16 buckets of the text's hash, one is held out for validation and two for the test.
_BUCKETS: Final = 16
_VALIDATION_BUCKETS: Final = frozenset({0})
_TEST_BUCKETS: Final = frozenset({1, 2})
_NAMES: Final = "abcdefgh"


@dataclass(frozen=True)
class Part:
    """One independent expression, `name = left * right + addend`."""

    name: str
    left: int
    right: int
    addend: int

    @property
    def expression(self) -> str:
        """The expression as the prompt writes it."""
        return f"{self.left}*{self.right}+{self.addend}"

    @property
    def product(self) -> int:
        """The value of the multiplication."""
        return self.left * self.right

    @property
    def value(self) -> int:
        """The value of the whole expression."""
        return self.product + self.addend


@dataclass(frozen=True)
class Problem:
    """A question, its parts, and the answer that a verifier compares with."""

    prompt_text: str
    gold: str
    family: Family
    parts: tuple[Part, ...]
    split: Split
    index: int

    @property
    def problem_id(self) -> str:
        """A stable name, unique among the problems of one task."""
        return f"multipart/{self.split.value}/{self.index}"

    @property
    def metadata(self) -> dict[str, str]:
        """What a data set's record says about a problem beside its question and answer."""
        return {"task": "multipart", "family": self.family.value, "parts": str(len(self.parts)), "id": self.problem_id}


def split_of(prompt_text: str) -> Split:
    """The split that a problem's text belongs to, whoever drew it."""
    bucket = hashlib.sha256(prompt_text.encode()).digest()[0] % _BUCKETS
    if bucket in _VALIDATION_BUCKETS:
        return Split.VALIDATION
    return Split.TEST if bucket in _TEST_BUCKETS else Split.TRAIN


@dataclass(frozen=True)
class MultipartTask:
    """A distribution of problems.

    Ranges are inclusive. Raises `ValueError` when a range is empty, when no family is named, or when there are
    more parts than names for them.
    """

    families: tuple[Family, ...] = tuple(Family)
    parts: tuple[int, int] = (2, 4)
    factor: tuple[int, int] = (2, 5)
    addend: tuple[int, int] = (1, 9)

    def __post_init__(self) -> None:
        object.__setattr__(self, "families", tuple(Family(family) for family in self.families))
        if not self.families:
            raise ValueError("families: name at least one of " + ", ".join(family.value for family in Family))
        for name, (low, high) in {"parts": self.parts, "factor": self.factor, "addend": self.addend}.items():
            if not 1 <= low <= high:
                raise ValueError(f"{name}: give a range with 1 <= low <= high, not ({low}, {high})")
        if self.parts[1] > len(_NAMES):
            raise ValueError(f"parts: at most {len(_NAMES)}, not {self.parts[1]}")

    def problem(self, index: int, split: Split | str) -> Problem:
        """Problem number `index` (>= 0) of a split. Two indices may draw the same text; two splits never do."""
        wanted = Split(split)
        rng = random.Random(f"multipart/{wanted.value}/{index}")
        while True:
            family, parts = self._draw(rng)
            prompt_text = _prompt(family, parts)
            if split_of(prompt_text) is wanted:
                gold = str(family.reduce([part.value for part in parts]))
                return Problem(prompt_text, gold, family, parts, wanted, index)

    def problems(self, count: int, split: Split | str, start: int = 0) -> list[Problem]:
        """The problems `start` to `start + count - 1` of a split."""
        return [self.problem(index, split) for index in range(start, start + count)]

    def _draw(self, rng: random.Random) -> tuple[Family, tuple[Part, ...]]:
        family = rng.choice(self.families)
        names = _NAMES[: rng.randint(*self.parts)]
        return family, tuple(
            Part(name, rng.randint(*self.factor), rng.randint(*self.factor), rng.randint(*self.addend))
            for name in names
        )


def _prompt(family: Family, parts: Sequence[Part]) -> str:
    return f"{family.value} of " + ", ".join(f"{part.name}={part.expression}" for part in parts)


def step_text(part: Part) -> str:
    """How a part is worked out: one operation at a time."""
    return f"{part.left}*{part.right}={part.product},{part.product}+{part.addend}={part.value}"


def takeaway_text(family: Family, values: Sequence[int]) -> str:
    """How the values are reduced: a running sum, or the list and its extreme."""
    if family is Family.SUM and len(values) > 1:
        totals = list(accumulate(values))
        return ",".join(f"{a}+{b}={c}" for a, b, c in zip(totals, values[1:], totals[1:], strict=False))
    return f"{family.value}({','.join(map(str, values))})={family.reduce(values)}"


def solution_text(problem: Problem, dialect: Dialect) -> str:
    """The canonical solution: well-formed, every part worked out, the gold answer boxed after the takeaway."""

    def tagged(role: Role, text: str) -> str:
        return f"{dialect.open(role)}{text}{dialect.close(role)}"

    def labelled(role: Role, texts: Iterable[str]) -> list[str]:
        return [tagged(role, dialect.label_of(index) + text) for index, text in enumerate(texts, start=1)]

    plans = labelled(Role.PLAN, [part.name for part in problem.parts])
    steps = labelled(Role.STEP, [step_text(part) for part in problem.parts])
    takeaway = tagged(Role.TAKEAWAY, takeaway_text(problem.family, [part.value for part in problem.parts]))
    block = "\n".join([tagged(Role.GUIDELINE, "".join(plans)), *steps, takeaway])
    if dialect.wrapped:
        block = tagged(Role.BLOCK, block)
    return f"{block}\n\\boxed{{{problem.gold}}}"
