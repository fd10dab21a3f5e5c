"""Splits a stream of text into tags and the text between them.

Invariants:
- The lexemes do not depend on how the stream is cut into chunks, except that text may come in more pieces.
- No character is lost: the lexemes' texts, joined, are the stream.
- A tag is given out with its last character, never later; text that can still become a tag is held back.
- Only exact spelling makes a tag: `< plan>` and `<Plan>` are text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from npr_common.dialects import Dialect
from npr_common.tags import Tag


class Lexeme(NamedTuple):
    """A tag, or a piece of text (then `tag` is None) that starts at character `start` of the stream."""

    start: int
    text: str
    tag: Tag | None

    @property
    def end(self) -> int:
        """The character after the last one."""
        return self.start + len(self.text)


class _Tables(NamedTuple):
    tag: re.Pattern[str]
    proper_prefixes: frozenset[str]


@functools.lru_cache(maxsize=64)
def _tables(dialect: Dialect) -> _Tables:
    texts = dialect.tag_texts
    prefixes = frozenset(text[:length] for text in texts for length in range(1, len(text)))
    return _Tables(re.compile("|".join(map(re.escape, texts))), prefixes)


class Lexer:
    """A streaming lexer for the tags of one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self._tag_texts = dialect.tag_texts
        self._tables = _tables(dialect)
        self._held = ""  # the end of the stream, if it is the beginning of a tag
        self._start = 0  # where `_held` starts in the stream

    def feed(self, chunk: str) -> Iterator[Lexeme]:
        """The lexemes that this chunk completes. Exhaust it before the next call."""
        text = self._held + chunk
        done = 0
        for match in self._tables.tag.finditer(text):
            yield from self._text(text[done : match.start()])
            yield self._lexeme(match.group(), self._tag_texts[match.group()])
            done = match.end()
        rest = text[done:]
        self._held = self._tag_beginning(rest)
        yield from self._text(rest[: len(rest) - len(self._held)])

    def finish(self) -> Iterator[Lexeme]:
        """What was held back: it has become no tag."""
        held, self._held = self._held, ""
        yield from self._text(held)

    def _tag_beginning(self, text: str) -> str:
        """The end of `text` that may still become a tag. A tag holds `<` at its start only, so the last one decides."""
        at = text.rfind("<")
        return text[at:] if at >= 0 and text[at:] in self._tables.proper_prefixes else ""

    def _text(self, text: str) -> Iterator[Lexeme]:
        if text:
            yield self._lexeme(text, None)

    def _lexeme(self, text: str, tag: Tag | None) -> Lexeme:
        lexeme = Lexeme(self._start, text, tag)
        self._start = lexeme.end
        return lexeme
