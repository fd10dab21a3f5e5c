"""What a request tells the plug-in, under the key `npr` of its sampling parameters' `custom_params`.

Invariants:
- Everything is checked here, when a request comes in: what the scheduler works with is sound.
- A request without the key is served as the server always does.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

KEY = "npr"

BACKEND = "npr"
"""Name of the radix-cache backend: a server is started with `--radix-cache-backend npr`."""

STATE_KEY = "npr"
"""Where the plug-in's counters are in the server's internal state."""

EVICTED = "npr:evicted"
"""Begins the message of an abort: a branch is not in the cache as a whole; seal it again, then join."""

NO_ROOM = "npr:no_room"
"""Begins the message of an abort: the request never fits into the KV pool."""

INVALID = "npr:invalid"
"""Begins the message of an abort: what the request tells the plug-in is not sound."""


FREE = -1
"""A place of a script that is drawn."""


class ContractError(ValueError):
    """What a request tells the plug-in is not sound; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of branches in a request's input: `trunk` tokens before it since the block before, then its branches.

    Attributes:
        branches: length of each branch span, header and closing tag included, in plan order.
    """

    trunk: int
    branches: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens of the input that it accounts for."""
        return self.trunk + sum(self.branches)

    @property
    def hidden(self) -> int:
        """How many RoPE positions it needs less than it has tokens: branches start at the same one."""
        return sum(self.branches) - max(self.branches)


@dataclass(frozen=True)
class Context:
    """The joined blocks that an input begins with; what comes behind them is the request's own."""

    blocks: tuple[Block, ...] = ()

    @cached_property
    def length(self) -> int:
        """Tokens of the input that the blocks account for."""
        return sum(block.length for block in self.blocks)

    @cached_property
    def hidden(self) -> int:
        """How far the RoPE position of what follows lies below its place in the input."""
        return sum(block.hidden for block in self.blocks)

    def parts(self, tokens: Sequence[int], namespace: str) -> list[Part]:
        """The branches of all blocks, each with what it is cached under.

        Args:
            tokens: an input that begins with the blocks.
            namespace: of the request itself.
        """
        found, start = [], 0
        for index, block in enumerate(self.blocks):
            own, begin = self.namespace(tokens, index, namespace), start + block.trunk
            for length in block.branches:
                key = array("q", [*tokens[start : start + block.trunk], *tokens[begin : begin + length]])
                found.append(Part(own, key, block.trunk))
                begin += length
            start = begin
        return found

    def namespace(self, tokens: Sequence[int], blocks: int, namespace: str) -> str:
        """What tokens behind the first `blocks` blocks are cached under: they depend on all that is before them."""
        if blocks == 0:
            return namespace
        shape = repr([(block.trunk, block.branches) for block in self.blocks[:blocks]])
        before = array("q", tokens[: sum(block.length for block in self.blocks[:blocks])])
        digest = hashlib.sha256(shape.encode() + before.tobytes()).hexdigest()
        return f"npr:{digest[:32]}:{namespace}"


@dataclass(frozen=True, slots=True)
class Part:
    """One branch as the cache knows it: the trunk since the block before, and the branch behind it.

    Attributes:
        trunk: how many of the tokens are the trunk's.
    """

    namespace: str
    tokens: array[int]
    trunk: int


@dataclass(frozen=True)
class Params:
    """What a request tells the plug-in.

    Attributes:
        context: the joined blocks that its input begins with.
        key: 64 bits that fix its draws (`npr_sampling.draw_key`).
        branch: which branch it is, counted from 0; -1 on the trunk.
        penalty: repetition penalty on what it says; 1 is off.
        said: tokens at the end of its input that count as said already.
        seal: whether its last token's keys and values are to be written before it ends.
        raw_log_probs: whether log-probabilities under the model's own softmax are wanted too.
        script: what it is to say, token by token, in tests and benchmarks; FREE, and what comes behind the end of the
            script, is drawn. The log-probabilities of its tokens are those of the model's own softmax.
    """

    context: Context = Context()
    key: int = 0
    branch: int = -1
    penalty: float = 1.0
    said: int = 0
    seal: bool = False
    raw_log_probs: bool = False
    script: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As it travels in a request."""
        return {
            "context": [[block.trunk, list(block.branches)] for block in self.context.blocks],
            "key": str(self.key),  # JSON's numbers end at 2^53
            "branch": self.branch,
            "penalty": self.penalty,
            "said": self.said,
            "seal": self.seal,
            "raw_log_probs": self.raw_log_probs,
            "script": list(self.script),
        }

    @classmethod
    def from_dict(cls, raw: Any, input_length: int) -> Params:
        """What a request with an input of so many tokens tells.

        Raises:
            ContractError: it is not sound.
        """
        if not isinstance(raw, Mapping):
            raise ContractError(f"{KEY} is {type(raw).__name__}, not an object")
        if unknown := raw.keys() - cls.__dataclass_fields__.keys():
            raise ContractError(f"{KEY} has unknown fields {sorted(unknown)}; the plug-in and its client differ")
        return cls(
            context=_context(raw.get("context", []), input_length),
            key=_whole(raw.get("key", 0), "key", 0, 2**64 - 1),
            branch=_whole(raw.get("branch", -1), "branch", -1, 2**31),
            penalty=_number(raw.get("penalty", 1.0), "penalty"),
            said=_whole(raw.get("said", 0), "said", 0, input_length),
            seal=bool(raw.get("seal", False)),
            raw_log_probs=bool(raw.get("raw_log_probs", False)),
            script=_script(raw.get("script", [])),
        )


def _context(raw: Any, input_length: int) -> Context:
    if not isinstance(raw, list):
        raise ContractError("context is not a list of blocks")
    blocks = []
    for entry in raw:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list) and entry[1]):
            raise ContractError("a block of the context is not [trunk length, [branch length, ...]]")
        branches = tuple(_whole(length, "a branch's length", 1, input_length) for length in entry[1])
        blocks.append(Block(_whole(entry[0], "a trunk's length", 1, input_length), branches))
    context = Context(tuple(blocks))
    if context.length >= input_length and blocks:
        raise ContractError(f"the context has {context.length} tokens, but the whole input {input_length}")
    return context


def _script(raw: Any) -> tuple[int, ...]:
    if not isinstance(raw, list):
        raise ContractError("script is not a list of tokens")
    return tuple(_whole(token, "a token of the script", FREE, 2**31) for token in raw)


def _whole(value: Any, name: str, least: int, most: int) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = least - 1
    if isinstance(value, float | bool) or not least <= number <= most:
        raise ContractError(f"{name} is {value!r}, which is not a whole number between {least} and {most}")
    return number


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ContractError(f"{name} is {value!r}, which is not a positive number")
    return float(value)
