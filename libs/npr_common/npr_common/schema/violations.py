"""What can be wrong with a response's structure.

Invariants:
- A violation is data, never an exception: a model may write anything.
- Each code names one broken rule of the schema, so that a reward can weigh it by its code alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ViolationCode(Enum):
    """One broken rule each. The parser reports all of them but NO_BLOCK, which a tag-free answer may well be."""

    NO_BLOCK = "no_block"
    """The response holds no block. Only `ParseResult.structural_violations` reports it."""
    UNEXPECTED_TAG = "unexpected_tag"
    """A tag stands where the grammar has no place for it, such as a closing tag that closes nothing. It is ignored."""
    NESTED_TAG = "nested_tag"
    """An opening tag stands inside an element that holds no elements, or a block inside a block. It is ignored."""
    UNCLOSED_TAG = "unclosed_tag"
    """An element ends without its closing tag: at the next element's tag or at the end of the response."""
    STRAY_TEXT_BETWEEN_TAGS = "stray_text_between_tags"
    """Text other than white space stands between two tags of a block. Reported once for each gap; an
    ignored tag ends no gap."""
    MISSING_GUIDELINE = "missing_guideline"
    """A wrapped block holds no guideline (only in dialects that wrap their blocks)."""
    NO_PLAN = "no_plan"
    """A guideline holds no plan."""
    EMPTY_PLAN = "empty_plan"
    """A plan says nothing beyond its label."""
    EMPTY_STEP = "empty_step"
    """A step says nothing beyond its label."""
    EMPTY_TAKEAWAY = "empty_takeaway"
    """A takeaway says nothing."""
    MISSING_LABEL = "missing_label"
    """A plan or step does not start with a label."""
    LABEL_OUT_OF_ORDER = "label_out_of_order"
    """The labels of a block's plans, or of its steps, do not run 1..n."""
    PLAN_STEP_COUNT_MISMATCH = "plan_step_count_mismatch"
    """A block has more steps than plans, or fewer."""
    MISSING_TAKEAWAY = "missing_takeaway"
    """A block ends without a takeaway."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule.

    Attributes:
        position: where it shows, in the unit of the parse: a character of the text or an index into the token ids.
        message: what is wrong there, for a reader.
    """

    code: ViolationCode
    position: int
    message: str
