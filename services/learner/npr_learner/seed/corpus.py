r"""The texts that the seed model is trained on, with its designed weaknesses.

The seed stands in for an instruct model: it can do the task, but carelessly, and it has seen the parallel format only
now and then, mostly broken. Each weakness is put in on purpose, so that the three stages have something to improve, and
each is one number in `Mix`:

- form: few texts are well-formed; most that try the format break it in one of the ways of `Defect`;
- haste: a part is often answered without working it out, and then a carry is mostly forgotten;
- slips: even worked out, an operation sometimes goes wrong.

A wrong value is carried on consistently, as a model's own slip would be.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from npr_common.tasks import Family, Part, Problem


@dataclass(frozen=True)
class Mix:
    """Shares of the styles (the rest are sequential solutions), and rates of errors per value."""

    well_formed: float = 0.06
    defective: float = 0.38
    bare: float = 0.04
    haste: float = 0.45
    forgotten_carry: float = 0.75
    slip: float = 0.07


class Defect(Enum):
    """One way in which a text in the format is broken."""

    PLAN_MISSING = auto()
    STEP_UNCLOSED = auto()
    PLAN_UNCLOSED = auto()
    GUIDELINE_UNCLOSED = auto()
    TAKEAWAY_MISSING = auto()
    LABEL_REPEATED = auto()
    PROSE_BETWEEN = auto()
    BOX_MISSING = auto()


@dataclass(frozen=True)
class Working:
    """What is written for one part or for the reduction, and the value it arrives at."""

    text: str
    value: int


_NAMES: Final = "abcdefgh"
_SLIPS: Final = (-10, -2, -1, 1, 2, 10)


class Author:
    """Writes one response to a problem; all chance comes from its generator."""

    def __init__(self, rng: random.Random, mix: Mix) -> None:
        self._rng = rng
        self._mix = mix

    def response(self, problem: Problem) -> str:
        """A response in a style drawn from the mix."""
        works = [self._work(part) for part in problem.parts]
        result = self._reduce(problem.family, [work.value for work in works])
        draw = self._rng.random()
        if draw < self._mix.bare:
            return f"\\boxed{{{result.value}}}"
        draw -= self._mix.bare
        if draw < self._mix.well_formed:
            return parallel_text(works, result)
        draw -= self._mix.well_formed
        if draw < self._mix.defective:
            return parallel_text(works, result, self._rng.choice(list(Defect)), self._rng.randrange(len(works)))
        return sequential_text(problem.parts, works, result)

    def _work(self, part: Part) -> Working:
        if self._rng.random() < self._mix.haste:
            value = self._hasty_value(part)
            return Working(f"{part.expression}={value}", value)
        product = self._slipped(part.product)
        value = self._slipped(product + part.addend)
        return Working(f"{part.left}*{part.right}={product},{product}+{part.addend}={value}", value)

    def _hasty_value(self, part: Part) -> int:
        carries = part.product % 10 + part.addend >= 10
        return part.value - 10 if carries and self._rng.random() < self._mix.forgotten_carry else part.value

    def _reduce(self, family: Family, values: Sequence[int]) -> Working:
        if family is not Family.SUM:
            value = family.reduce(values)
            return Working(f"{family.value}({','.join(map(str, values))})={value}", value)
        total, sums = values[0], []
        for value in values[1:]:
            new = self._slipped(total + value)
            sums.append(f"{total}+{value}={new}")
            total = new
        return Working(",".join(sums), total)

    def _slipped(self, value: int) -> int:
        return max(0, value + self._rng.choice(_SLIPS)) if self._rng.random() < self._mix.slip else value


def sequential_text(parts: Sequence[Part], works: Sequence[Working], result: Working) -> str:
    """The plain style: one line for each part, one for the reduction, and the answer."""
    lines = [f"{part.name}:{work.text}" for part, work in zip(parts, works, strict=True)]
    return "\n".join([*lines, result.text, f"\\boxed{{{result.value}}}"])


@dataclass
class Draft:
    """A text in the format, in pieces, so that a defect can break one of them."""

    plans: list[str]
    steps: list[str]
    takeaway: str
    answer: str
    guideline_close: str = "</guideline>"
    between: str = ""

    def __str__(self) -> str:
        guideline = f"<guideline>{''.join(self.plans)}{self.guideline_close}"
        return f"{guideline}{self.between}{''.join(self.steps)}{self.takeaway}{self.answer}"

    def break_at(self, at: int, defect: Defect) -> None:
        """Apply a defect, at part `at` (from 0) where the defect is one of a part."""
        match defect:
            case Defect.PLAN_MISSING:
                self.plans.pop()
            case Defect.PLAN_UNCLOSED:
                self.plans[at] = self.plans[at].removesuffix("</plan>")
            case Defect.STEP_UNCLOSED:
                self.steps[at] = self.steps[at].removesuffix("</step>")
            case Defect.GUIDELINE_UNCLOSED:
                self.guideline_close = ""
            case Defect.TAKEAWAY_MISSING:
                self.takeaway = ""
            case Defect.LABEL_REPEATED:
                self.steps[at] = self.steps[at].replace(f">{at + 1}:", f">{at or 2}:")
            case Defect.PROSE_BETWEEN:
                self.between = "\n" + self.steps[at].split(":", 1)[1].removesuffix("</step>")
            case Defect.BOX_MISSING:
                self.answer = self.answer.replace("\\boxed{", "").removesuffix("}")


def parallel_text(works: Sequence[Working], result: Working, defect: Defect | None = None, at: int = 0) -> str:
    """A text in the format: well-formed, or with a defect at part `at`."""
    draft = Draft(
        plans=[f"<plan>{label}:{name}</plan>" for label, name in zip(range(1, len(works) + 1), _NAMES, strict=False)],
        steps=[f"\n<step>{label}:{work.text}</step>" for label, work in enumerate(works, start=1)],
        takeaway=f"\n<takeaway>{result.text}</takeaway>",
        answer=f"\n\\boxed{{{result.value}}}",
    )
    if defect is not None:
        draft.break_at(at, defect)
    return str(draft)
