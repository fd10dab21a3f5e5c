"""The schema of a response: one parser for engine, reward, learner and viewer."""

from npr_common.schema.answer import boxed, final_answer, has_final_box
from npr_common.schema.grammar import State
from npr_common.schema.parser import (
    ParseResult,
    ParserUsageError,
    SpelledTag,
    StreamingParser,
    parse_text,
    parse_tokens,
)
from npr_common.schema.tree import Block, Guideline, Plan, Prose, Response, Span, Step, Takeaway
from npr_common.schema.violations import Violation, ViolationCode

__all__ = [
    "Block",
    "Guideline",
    "ParseResult",
    "ParserUsageError",
    "Plan",
    "Prose",
    "Response",
    "Span",
    "SpelledTag",
    "State",
    "Step",
    "StreamingParser",
    "Takeaway",
    "Violation",
    "ViolationCode",
    "boxed",
    "final_answer",
    "has_final_box",
    "parse_text",
    "parse_tokens",
]
