"""The one parser: text or token ids, in a stream or at once.

Invariants:
- It never raises on what a model wrote; what is wrong with it is listed as violations.
- Both ways of feeding run the same lexer and the same grammar over the same text, so they agree on any input. They
  differ in the unit of positions: characters of the response, or indices into the token ids, prompt included.
- The parser reads the response alone. The prompt's tags are the user's text: it never sees them.
- A tag that is spelled out in ordinary tokens is a tag, as in text. Where the vocabulary has the tag as one token, it
  is listed in `spelled_tags` too, for topology and engine only know the one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from npr_common.dialects import Dialect
from npr_common.schema.detokenizer import Detokenizer
from npr_common.schema.grammar import Grammar, State
from npr_common.schema.lexer import Lexeme, Lexer
from npr_common.schema.tree import Plan, Response, Span
from npr_common.schema.violations import Violation, ViolationCode
from npr_common.tags import Tag, TagIds


class ParserUsageError(RuntimeError):
    """The caller, not the model, did something wrong."""


@dataclass(frozen=True, slots=True)
class SpelledTag:
    """A tag made of ordinary tokens, at index `position`, although the vocabulary has it as one."""

    tag: Tag
    position: int


@dataclass(frozen=True, slots=True)
class ParseResult:
    """The tree of a response and all that is wrong with it.

    Attributes:
        violations: in the order in which they were found; empty for a well-formed response.
        spelled_tags: tags in ordinary tokens; no part of equality, as text has no tokens.
    """

    tree: Response
    violations: tuple[Violation, ...]
    spelled_tags: tuple[SpelledTag, ...] = field(default=(), compare=False)

    @property
    def well_formed(self) -> bool:
        """Whether the response follows the grammar. A tag-free answer does: see `holds_block`."""
        return not self.violations

    @property
    def holds_block(self) -> bool:
        """Whether the response holds a block, well-formed or not."""
        return bool(self.tree.blocks)

    @property
    def structural_violations(self) -> tuple[Violation, ...]:
        """The violations, and NO_BLOCK first if there is no block: what a structural filter asks to be empty."""
        if self.holds_block:
            return self.violations
        missing = Violation(ViolationCode.NO_BLOCK, self.tree.span.start, "The response holds no block.")
        return (missing, *self.violations)


class StreamingParser:
    """Parses one response as it comes, either from text or from token ids.

    After each call, `state`, `violations`, `block_violations` and `guideline_plans()` say what is known so far.
    """

    def __init__(
        self, dialect: Dialect, tokenizer: Any = None, *, tags: TagIds | None = None, prompt_length: int = 0
    ) -> None:
        """Start a response.

        Args:
            dialect: the tags to look for.
            tokenizer: the `transformers` tokenizer of the ids; without it the parser takes text.
            tags: the dialect's tags in it, looked up if not given.
            prompt_length: index of the response's first token, added to all positions. The prompt is not fed.
        """
        self._detokenizer = Detokenizer(tokenizer, prompt_length) if tokenizer is not None else None
        self._tags = TagIds.from_tokenizer(tokenizer, dialect) if tokenizer is not None and tags is None else tags
        self._prompt_length = prompt_length
        self._ids: list[int] = []
        self._spelled: list[SpelledTag] = []
        self._lexer = Lexer(dialect)
        self._grammar = Grammar(dialect, self._detokenizer.locate if self._detokenizer else Span)
        self._length = 0
        self._result: ParseResult | None = None

    @property
    def state(self) -> State:
        """Where in the grammar the response is."""
        return self._grammar.state

    @property
    def violations(self) -> tuple[Violation, ...]:
        """All violations so far."""
        return tuple(self._grammar.violations)

    @property
    def block_violations(self) -> tuple[Violation, ...]:
        """The violations so far of the block that is open; none in prose."""
        return self._grammar.block_violations

    def guideline_plans(self) -> tuple[Plan, ...] | None:
        """The plans of a guideline that has just closed: until its first step opens. None at any other time."""
        grammar = self._grammar
        if grammar.state is not State.STEPS or grammar.step_count or grammar.guideline is None:
            return None
        return grammar.guideline.plans

    def feed_text(self, chunk: str) -> None:
        """Take the next piece of the response's text.

        Raises:
            ParserUsageError: the parser takes token ids, or the response has ended.
        """
        if self._detokenizer is not None:
            raise ParserUsageError("This parser has a tokenizer: feed it with feed_token.")
        self._refuse_if_finished()
        self._take(chunk)

    def feed_token(self, token_id: int) -> None:
        """Take the response's next token.

        Raises:
            ParserUsageError: the parser takes text, or the response has ended.
        """
        if self._detokenizer is None:
            raise ParserUsageError("This parser has no tokenizer: give it one, or feed it with feed_text.")
        self._refuse_if_finished()
        self._ids.append(token_id)
        self._take(self._detokenizer.feed(token_id))

    def finish(self) -> ParseResult:
        """End the response. Asked again, it gives the same result."""
        if self._result is None:
            if self._detokenizer is not None:
                self._take(self._detokenizer.finish())
            self._take_lexemes(self._lexer.finish())
            tree = self._grammar.finish(self._length)
            self._result = ParseResult(tree, self.violations, tuple(self._spelled))
        return self._result

    def _refuse_if_finished(self) -> None:
        if self._result is not None:
            raise ParserUsageError("The response has ended: start another parser.")

    def _take(self, chunk: str) -> None:
        self._length += len(chunk)
        self._take_lexemes(self._lexer.feed(chunk))

    def _take_lexemes(self, lexemes: Iterable[Lexeme]) -> None:
        for lexeme in lexemes:
            if lexeme.tag is not None and self._tags is not None and self._detokenizer is not None:
                position = self._detokenizer.locate(lexeme.start, lexeme.end).start
                if self._ids[position - self._prompt_length] != self._tags.id_of[lexeme.tag]:
                    self._spelled.append(SpelledTag(lexeme.tag, position))
            self._grammar.take(lexeme)


def parse_text(text: str, dialect: Dialect) -> ParseResult:
    """Parse a response's text. Positions are characters. Never raises, whatever the text."""
    parser = StreamingParser(dialect)
    parser.feed_text(text)
    return parser.finish()


def parse_tokens(
    ids: Sequence[int], tokenizer: Any, dialect: Dialect, prompt_length: int = 0, *, tags: TagIds | None = None
) -> ParseResult:
    """Parse the response in a trajectory's ids. Positions are indices into `ids`. Never raises, whatever the ids.

    Args:
        ids: prompt and response.
        tokenizer: the `transformers` tokenizer that the ids belong to.
        dialect: the tags to look for.
        prompt_length: number of prompt tokens at the front, which are skipped.
        tags: the dialect's tags in the tokenizer, looked up if not given.
    """
    parser = StreamingParser(dialect, tokenizer, tags=tags, prompt_length=prompt_length)
    for token_id in ids[prompt_length:]:
        parser.feed_token(int(token_id))
    return parser.finish()
