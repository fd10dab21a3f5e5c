"""Responses written as text, encoded as the engine would have fed and sampled them.

This is the one legitimate place where text becomes tokens in training: what NPR-Zero wrote has no tag tokens, and
public trajectories are text.

Invariants:
- Whatever white space a text has before a step or a takeaway, the tokens there are the engine's own cue, flagged as
  forced. All else is as written.
- Every piece is encoded on its own, as it is when decoding goes on after a forced cue.
- The response ends with the tokenizer's EOS, which is trained.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from npr_common.cues import Cue, step_cue, takeaway_cue
from npr_common.dialects import Dialect
from npr_common.schema import Block, Step, parse_text
from npr_common.tags import Role

Piece = str | Cue
"""A run of text that the engine would sample, or a cue that it would feed."""


class Encoded(NamedTuple):
    """A response's ids with one forced flag each."""

    ids: list[int]
    forced: list[bool]


@dataclass(frozen=True)
class ResponseEncoder:
    """Encodes for one stage: with cues where its visibility is parallel, as plain text where it is causal."""

    tokenizer: Any
    dialect: Dialect
    parallel: bool

    def encode(self, response_text: str) -> Encoded | None:
        """The response with EOS; None when it is to be parallel and isn't well-formed or holds no block."""
        text = response_text.removesuffix(self.tokenizer.eos_token)
        pieces: list[Piece] | None = canonical_pieces(text, self.dialect) if self.parallel else [text]
        if pieces is None:
            return None
        ids: list[int] = []
        forced: list[bool] = []
        for piece in pieces:
            tokens = self._ids_of(piece)
            ids += tokens
            forced += [isinstance(piece, Cue)] * len(tokens)
        return Encoded([*ids, self.tokenizer.eos_token_id], [*forced, False])

    def _ids_of(self, piece: Piece) -> list[int]:
        if isinstance(piece, Cue):
            return piece.encode(self.tokenizer)
        ids: list[int] = self.tokenizer.encode(piece, add_special_tokens=False)
        return ids


def canonical_pieces(text: str, dialect: Dialect) -> list[Piece] | None:
    """A well-formed response cut at its cues; None if it isn't well-formed or holds no block."""
    parsed = parse_text(text, dialect)
    if not parsed.well_formed or not parsed.holds_block:
        return None
    pieces: list[Piece] = []
    cursor = 0
    for block in parsed.tree.blocks:
        for start, end, cue in _cues(text, block, dialect):
            pieces += [text[cursor:start].rstrip(), cue]
            cursor = end
    return [piece for piece in [*pieces, text[cursor:]] if piece]


def _cues(text: str, block: Block, dialect: Dialect) -> Iterator[tuple[int, int, Cue]]:
    """Where each of a block's cues stands in the text, and what the engine would feed there."""
    for number, step in enumerate(block.steps, start=1):
        yield step.span.start, _after_label(text, step, dialect), step_cue(dialect, number)
    if block.takeaway is not None:
        start = block.takeaway.span.start
        yield start, start + len(dialect.open(Role.TAKEAWAY)), takeaway_cue(dialect)


def _after_label(text: str, step: Step, dialect: Dialect) -> int:
    start = step.span.start + len(dialect.open(Role.STEP))
    label = dialect.label_pattern.match(text, start, step.span.end)
    return label.end() if label else start
