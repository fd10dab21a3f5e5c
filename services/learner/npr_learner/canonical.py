r"""Responses written as text, encoded as the engine would have fed and sampled them.

This is the one legitimate place where text becomes tokens in training: what NPR-Zero wrote has no tag tokens, and
public trajectories are text.

Invariants:
- Whatever white space a text has before a step or a takeaway, the tokens there are the engine's own cue: `\n<step>i:`
  and `\n<takeaway>`, flagged as forced. All else is as written.
- Every piece is encoded on its own, as it is when decoding goes on after a forced cue.
- The response ends with the tokenizer's EOS, which is trained.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from npr.types.v1 import prompt_pb2
from npr_common.dialects import Dialect
from npr_common.errors import InvalidArgumentError
from npr_common.schema import Block, Step, parse_text
from npr_common.tags import Role

_CUE_SEPARATOR = "\n"


class Piece(NamedTuple):
    """A run of text, and whether the engine would force it."""

    text: str
    forced: bool


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
        pieces = canonical_pieces(text, self.dialect) if self.parallel else [Piece(text, forced=False)]
        if pieces is None:
            return None
        ids: list[int] = []
        forced: list[bool] = []
        for piece in pieces:
            tokens = self.tokenizer.encode(piece.text, add_special_tokens=False)
            ids += tokens
            forced += [piece.forced] * len(tokens)
        return Encoded([*ids, self.tokenizer.eos_token_id], [*forced, False])


def canonical_pieces(text: str, dialect: Dialect) -> list[Piece] | None:
    """A well-formed response cut at its cues; None if it isn't well-formed or holds no block."""
    parsed = parse_text(text, dialect)
    if not parsed.well_formed or not parsed.holds_block:
        return None
    pieces: list[Piece] = []
    cursor = 0
    for block in parsed.tree.blocks:
        for start, end, cue in _cues(text, block, dialect):
            pieces += [Piece(text[cursor:start].rstrip(), forced=False), Piece(cue, forced=True)]
            cursor = end
    return [piece for piece in [*pieces, Piece(text[cursor:], forced=False)] if piece.text]


def _cues(text: str, block: Block, dialect: Dialect) -> Iterator[tuple[int, int, str]]:
    """Where each of a block's cues stands in the text, and what the engine would feed there."""
    for index, step in enumerate(block.steps, start=1):
        cue = f"{_CUE_SEPARATOR}{dialect.open(Role.STEP)}{dialect.label_of(index)}"
        yield step.span.start, _after_label(text, step, dialect), cue
    if block.takeaway is not None:
        start, tag = block.takeaway.span.start, dialect.open(Role.TAKEAWAY)
        yield start, start + len(tag), f"{_CUE_SEPARATOR}{tag}"


def _after_label(text: str, step: Step, dialect: Dialect) -> int:
    start = step.span.start + len(dialect.open(Role.STEP))
    label = dialect.label_pattern.match(text, start, step.span.end)
    return label.end() if label else start


def encode_prompt(tokenizer: Any, prompt: prompt_pb2.Prompt) -> list[int]:
    """A prompt's ids in this tokenizer, by its chat template; ids that the caller gave stay as they are.

    Raises:
        InvalidArgumentError: the tokenizer has no chat template.
    """
    if prompt.token_ids:
        return list(prompt.token_ids)
    return encode_messages(tokenizer, [{"role": item.role, "content": item.content} for item in prompt.messages])


def encode_messages(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """A conversation's ids up to where the assistant's answer starts.

    Raises:
        InvalidArgumentError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise InvalidArgumentError(
            "the model's tokenizer has no chat template: add chat_template.jinja to its folder",
            reason="NO_CHAT_TEMPLATE",
        )
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
