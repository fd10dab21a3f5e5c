r"""The final answer: the contents of `\boxed{...}`.

Invariants:
- Braces are matched, escaped ones (`\{`) are text. A box inside another is part of the outer one's answer.
- One pass over the text, whatever it is.
"""

from __future__ import annotations

import re

from npr_common.schema.tree import Response

_TOKEN = re.compile(r"\\boxed[ \t]*\{|\\.|[{}]", re.DOTALL)


def boxed(text: str) -> tuple[str, ...]:
    r"""The contents of all outermost complete `\boxed{...}`, in order."""
    boxes: list[tuple[int, str]] = []  # where each box starts, and what it holds
    open_braces: list[tuple[int, int] | None] = []  # start of the box and of its contents; None for other braces
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token.startswith("\\boxed"):
            open_braces.append((match.start(), match.end()))
        elif token == "{":
            open_braces.append(None)
        elif token == "}" and open_braces and (box := open_braces.pop()):
            start, content = box
            while boxes and boxes[-1][0] > start:
                boxes.pop()
            boxes.append((start, text[content : match.start()]))
    return tuple(content for _, content in boxes)


def final_answer(text: str) -> str | None:
    r"""What the last complete `\boxed{...}` of the text holds, stripped; None if there is none."""
    boxes = boxed(text)
    return boxes[-1].strip() if boxes else None


def has_final_box(response: Response) -> bool:
    r"""Whether exactly one `\boxed{...}` follows the last takeaway, or stands in the text if it holds no block."""
    return len(boxed(response.final_prose)) == 1
