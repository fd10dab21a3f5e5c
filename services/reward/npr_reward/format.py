r"""The graded format reward of stage 1 (SPEC section 4).

The penalty is 0 exactly when the response parses, holds at least one block and has exactly one `\boxed{}` after its
last takeaway. Otherwise it is the sum of the weights of what is wrong, clamped to [-2, 0); a response without a block
gets the worst, -2. Fewer faults never score lower, so that a policy far from the format still has a slope to climb.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from npr_common.dialects import Dialect
from npr_common.schema import ViolationCode, has_final_box, parse_text

WORST = -2.0
"""The penalty of a response that holds no block, and the lower bound of every other."""

FINAL_BOX = "final_box"
"""The code of the one fault that is not the parser's: not exactly one box after the last takeaway."""

WEIGHTS: Mapping[str, float] = MappingProxyType(
    {
        ViolationCode.NO_BLOCK.value: -2.0,
        # The block's skeleton: without these parts it can't be forked or joined.
        ViolationCode.MISSING_GUIDELINE.value: -1.0,
        ViolationCode.NO_PLAN.value: -1.0,
        ViolationCode.PLAN_STEP_COUNT_MISMATCH.value: -0.5,
        ViolationCode.MISSING_TAKEAWAY.value: -0.5,
        ViolationCode.UNCLOSED_TAG.value: -0.5,
        ViolationCode.NESTED_TAG.value: -0.5,
        # Faults inside a block that has its skeleton.
        ViolationCode.UNEXPECTED_TAG.value: -0.25,
        ViolationCode.STRAY_TEXT_BETWEEN_TAGS.value: -0.25,
        ViolationCode.MISSING_LABEL.value: -0.25,
        ViolationCode.LABEL_OUT_OF_ORDER.value: -0.25,
        ViolationCode.EMPTY_PLAN.value: -0.25,
        ViolationCode.EMPTY_STEP.value: -0.25,
        ViolationCode.EMPTY_TAKEAWAY.value: -0.25,
        FINAL_BOX: -0.5,
    }
)
"""What each fault costs, every time it occurs."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the format; `position` is a character offset in the response."""

    code: str
    position: int
    message: str


@dataclass(frozen=True, slots=True)
class FormatGrade:
    """The penalty in [-2, 0], 0 only without faults, and the faults in the order in which they were found."""

    penalty: float
    faults: tuple[Fault, ...]

    @property
    def passed(self) -> bool:
        """Whether the response is well-formed, holds a block and has its final box."""
        return not self.faults


def grade_format(response_text: str, dialect: Dialect) -> FormatGrade:
    """Grades a response of any content; never raises."""
    result = parse_text(response_text, dialect)
    faults = [Fault(found.code.value, found.position, found.message) for found in result.structural_violations]
    if not has_final_box(result.tree):
        faults.append(Fault(FINAL_BOX, len(response_text), "Not exactly one \\boxed{...} follows the last takeaway."))
    return FormatGrade(penalty([fault.code for fault in faults]), tuple(faults))


def penalty(codes: list[str]) -> float:
    """The clamped sum of the faults' weights; 0 for none."""
    return max(WORST, sum(WEIGHTS[code] for code in codes)) if codes else 0.0
