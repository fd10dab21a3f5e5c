"""LaTeX to SymPy by math-verify, unevaluated.

Parsing is lazy: `10^{10^{10}}` becomes a tree of powers and no number, so that `magnitude` can look at it before
anything evaluates it. Golds and answers go the same way, so that a quirk of the parser meets itself.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from itertools import accumulate
from typing import TypeAlias

from math_verify import LatexExtractionConfig, parse
from sympy import Basic, MatrixBase, nan, zoo

# math-verify's own alarm is off on purpose: the sandbox's deadline is enforced from outside the process.
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_DEPTH = 40
"""Nested groups that an answer may have: the parser's time grows out of proportion with them."""

_CONFIG = [LatexExtractionConfig(boxed_match_priority=0)]
# `11 5/6` is a mixed number; the parser would multiply. After a digit or a group it is no integer part.
_MIXED = re.compile(r"(?<![\d.)}\]])(\d+)\s+(\d+)/(\d+)(?![\d.])")

Value: TypeAlias = "Basic | MatrixBase"


@lru_cache(maxsize=4096)
def parse_latex(text: str) -> Value | None:
    """The mathematical value of `text`, or None when it is not mathematics or nested deeper than `MAX_DEPTH`.

    A group of answers shares its gold, and its answers repeat: hence the cache.
    """
    if _depth(text) > MAX_DEPTH:
        return None
    found = parse("\\boxed{" + _MIXED.sub(r"(\1+\2/\3)", text) + "}", _CONFIG, parsing_timeout=None)
    return found[0] if found and isinstance(found[0], Basic | MatrixBase) else None


def is_finite(value: Value) -> bool:
    """Whether `value` is more than a division by zero, which is what the parser makes of a clock time like `12:00`."""
    return isinstance(value, MatrixBase) or not value.has(zoo, nan)


def _depth(text: str) -> int:
    """The deepest nesting of brackets in `text`, closing ones taken as they come."""
    return max(accumulate((c in "([{") - (c in ")]}") for c in text), default=0)
