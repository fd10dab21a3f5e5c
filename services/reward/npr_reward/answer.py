r"""Finds the answer that a response commits to. Linear in the response; never evaluates anything.

In order of precedence:
1. The last `\boxed{...}`. A response whose last box never closes was cut off and has no answer.
2. What follows the last `Answer:` or `answer is`, to the end of its line.
3. A math span (`$...$`, `\(...\)`, `\[...\]`) that ends the response.
4. The whole response, when it is a single line of mathematics rather than prose.
"""

from __future__ import annotations

import re

from npr_common.schema import boxed

_BOX = re.compile(r"\\boxed\s*\{")
_ANCHOR = re.compile(r"\banswer\b[\s*_]{0,8}(?:is|:|=)[\s*_:]{0,8}([^\n]*)", re.IGNORECASE)
_SPAN = re.compile(
    r"\$\$([^$]+)\$\$|(?<!\\)\$((?:\\\$|[^$\n])+)(?<!\\)\$|\\\(((?:(?!\\\)).)+)\\\)|\\\[((?:(?!\\\]).)+)\\\]", re.DOTALL
)
_COMMAND = re.compile(r"\\(?:text|mathrm|operatorname)\{[^{}]*\}|\\[A-Za-z]+")
_PROSE = re.compile(r"[A-Za-z]{2,}[,;]?\s+[A-Za-z]{2,}")
_DOLLARS = re.compile(r"(?<!\\)\$|\\[()\[\]]")
# A closing span or a bare answer is short; bounding the scan keeps it cheap on any response.
_TAIL_CHARS = 4096


def final_answer(response_text: str) -> str | None:
    """The final answer without its wrapping (box, dollars, markdown), or None when the response commits to none."""
    starts = [box.start() for box in _BOX.finditer(response_text)]
    if starts:
        return _clean(next(iter(boxed(response_text[starts[-1] :])), None))
    anchors = [anchor.group(1) for anchor in _ANCHOR.finditer(response_text)]
    if anchors:
        return _clean(_first_span(anchors[-1][:_TAIL_CHARS]) or anchors[-1])
    return _clean(_closing_span(response_text[-_TAIL_CHARS:]) or _bare(response_text))


def unwrap(gold: str) -> str:
    """A gold without its box, GSM8K marker or dollar signs: the form in which it is compared."""
    boxes = boxed(gold)
    text = boxes[-1] if boxes else gold.rpartition("####")[2]
    return _DOLLARS.sub("", text).strip()


def _first_span(line: str) -> str | None:
    """What the first math span of a line holds."""
    span = _SPAN.search(line)
    return _content(span) if span else None


def _closing_span(tail: str) -> str | None:
    """What the math span that ends `tail` holds, if one does; punctuation may follow it."""
    text = tail.rstrip(".*! \n")
    spans = list(_SPAN.finditer(text))
    return _content(spans[-1]) if spans and spans[-1].end() == len(text) else None


def _bare(response_text: str) -> str | None:
    """The whole response, when it is one line and holds no two words in a row."""
    text = response_text.strip()
    if len(text) > _TAIL_CHARS or "\n" in text or _PROSE.search(_COMMAND.sub(" ", text)):
        return None
    return text


def _content(span: re.Match[str]) -> str:
    return next(group for group in span.groups() if group is not None)


def _clean(text: str | None) -> str | None:
    """`text` without surrounding space, markdown, dollars and the sentence's full stop; None when nothing is left."""
    if text is None:
        return None
    return _DOLLARS.sub("", text.strip().strip("*").strip().removesuffix(".")).strip() or None
