"""Token ids to text, one token at a time, with the way back from characters to tokens.

Invariants:
- The chunks, joined, are what the tokenizer decodes from the whole list (special tokens kept, no clean-up).
- Text that is given out is final. A character of which only some bytes have come is held back until it is whole.
- Memory and time per token are bounded, whatever the ids: unknown ids are no text, and garbage bytes fill no buffer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from npr_common.schema.tree import Span

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_HELD = 3  # a character has at most four bytes, so at most three stand for one that is not whole yet
_CONTEXT = 8  # tokens that settle how the next one decodes, once bytes are pending
_MAX_ID = 2**31

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Decodes one list of ids incrementally and remembers which token each character came with."""

    def __init__(self, tokenizer: Any, first_index: int = 0) -> None:
        """Start a list whose first token has index `first_index`. `tokenizer` is one of `transformers`."""
        self._decode, self._known = _decoder(tokenizer)
        self._first_index = first_index
        self._window: list[int] = []  # the last tokens, as context for the next
        self._given = 0  # characters of the decoded window that have been given out
        self._held = 0  # characters at its end that have not
        self._starts: list[int] = []  # for each token, the characters given out before it
        self._length = 0

    def feed(self, token_id: int) -> str:
        """Take the next id; the text that has become final with it, which may be empty."""
        self._starts.append(self._length)
        if not (0 <= token_id < _MAX_ID and self._known(token_id)):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        self._held = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_HELD)
        chunk = text[self._given : len(text) - self._held]
        self._shrink(len(text))
        self._length += len(chunk)
        return chunk

    def finish(self) -> str:
        """What was held back: it has become no whole character."""
        rest = _REPLACEMENT * self._held
        self._held = 0
        self._length += len(rest)
        return rest

    def locate(self, start: int, end: int) -> Span:
        """The tokens that hold the characters `start <= i < end` given out so far.

        A character made of several tokens counts to the last of them. An empty range is the empty span after the
        token before it. What lies behind the text is the empty span behind the last token.
        """
        if start >= self._length:
            return Span(self._first_index + len(self._starts), self._first_index + len(self._starts))
        last = bisect_right(self._starts, end - 1) if end > 0 else 0
        first = bisect_right(self._starts, start) - 1 if start < end else last
        return Span(self._first_index + first, self._first_index + last)

    def _shrink(self, length: int) -> None:
        """Forget the tokens that no longer matter; `length` is that of the decoded window."""
        keep = 1 if self._held == 0 else _CONTEXT
        if self._held and len(self._window) <= 2 * keep:
            self._given = max(self._given, length - self._held)
            return
        self._window = self._window[-keep:]
        self._given = len(self._decode(self._window)) - self._held


def _decoder(tokenizer: Any) -> tuple[Decode, Callable[[int], bool]]:
    """How to decode ids with this tokenizer, and how to tell that it knows an id."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return (
            lambda ids: backend.decode(ids, skip_special_tokens=False),
            lambda token_id: backend.id_to_token(token_id) is not None,
        )
    size = len(tokenizer)
    return (
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        lambda token_id: token_id < size,
    )
