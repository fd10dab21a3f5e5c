"""What goes over the wire to an SGLang server: asks for streams of tokens out, tokens and ends in.

Invariant: every stream that is asked for ends in one `Ended`, whatever becomes of the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from npr_rollout.record.request import SamplingParams
from npr_rollout.record.trajectory import Drawn
from npr_sglang.contract import EVICTED, INVALID, KEY, NO_ROOM, Params

_RAW = "npr_raw_log_probs"
_ALL_TOKENS = -1  # what the server takes for no top_k


class End(Enum):
    """Why a stream ended."""

    STOPPED = "stopped"
    """At one of its stop ids."""
    LENGTH = "length"
    """It has as many tokens as it asked for."""
    ABORTED = "aborted"
    """Somebody aborted it."""
    EVICTED = "evicted"
    """A branch that it stands on is not in the cache any more."""
    NO_ROOM = "no_room"
    """It never fits into the server's pool."""
    REFUSED = "refused"
    """The server takes it for wrong."""
    BROKEN = "broken"
    """Its answer broke off, though the server is there: it may be asked for again."""
    LOST = "lost"
    """The server does not answer any more."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A stream to be decoded.

    Attributes:
        name: unique.
        tokens: all of its input.
        stop: ids after which it ends.
        params: for the plug-in; None where the server has none.
        at_once: whether each token is to be told as it comes, not some at a time.
    """

    name: str
    tokens: list[int]
    max_tokens: int
    stop: tuple[int, ...]
    sampling: SamplingParams
    params: Params | None
    at_once: bool = False

    def sampling_params(self) -> dict[str, Any]:
        """How it is decoded, as the server takes it."""
        params = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k or _ALL_TOKENS,
            "min_p": self.sampling.min_p,
            "max_new_tokens": self.max_tokens,
            "stop_token_ids": list(self.stop),
            "ignore_eos": not self.stop,
        }
        if self.at_once:
            params["stream_interval"] = 1
        if self.params is not None:
            params["custom_params"] = {KEY: self.params.to_dict()}
        return params


def body_of(asks: Sequence[Ask]) -> dict[str, Any]:
    """A request for streams that begin together, in one batch of the server where it has room."""
    return {
        "rid": [ask.name for ask in asks],
        "input_ids": [ask.tokens for ask in asks],
        "sampling_params": [ask.sampling_params() for ask in asks],
        "return_logprob": True,
        "stream": True,
    }


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of a stream.

    Attributes:
        input_tokens: with the first ones: of its input, `cached_tokens` of which the server did not have to compute.
    """

    name: str
    drawn: list[Drawn]
    input_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a stream.

    Attributes:
        retractions: how often the server took its memory away and computed it again.
    """

    name: str
    end: End
    message: str = ""
    retractions: int = 0


class Answer:
    """What a server answers to a request for streams."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self._taken = {ask.name: 0 for ask in asks}  # tokens of each stream that has not ended

    def take(self, message: Mapping[str, Any]) -> Iterator[Tokens | Ended]:
        """What a message tells of one of the streams. An error that names none is about all that have not ended."""
        if "error" in message:
            yield from self.refused(json.dumps(message))
            return
        meta = message["meta_info"]
        name = meta["id"]
        if name not in self._taken:
            return
        taken = self._taken[name]
        if drawn := _new_tokens(meta, taken):
            self._taken[name] += len(drawn)
            yield Tokens(name, drawn, *(_input(meta) if not taken else ()))
        if (reason := meta.get("finish_reason")) is not None:
            del self._taken[name]
            yield _ended(name, reason, int(meta.get("num_retractions") or 0))

    def refused(self, text: str) -> Iterator[Ended]:
        """The server takes what was asked for wrong."""
        return self._all_end(_kind(text, End.REFUSED), text[:500])

    @property
    def unended(self) -> list[str]:
        """Names of the streams that have not ended."""
        return list(self._taken)

    def broken(self, text: str) -> Iterator[Ended]:
        """Nothing more comes from a server that is there."""
        return self._all_end(End.BROKEN, text)

    def lost(self, text: str) -> Iterator[Ended]:
        """Nothing more comes: the ends of streams that have none."""
        return self._all_end(End.LOST, text)

    def _all_end(self, end: End, text: str) -> Iterator[Ended]:
        while self._taken:
            yield Ended(self._taken.popitem()[0], end, text)


def _new_tokens(meta: Mapping[str, Any], taken: int) -> list[Drawn]:
    """Those behind the first `taken`; some servers tell all tokens each time."""
    log_probs = meta.get("output_token_logprobs") or []
    raw = meta.get(_RAW) or [0.0] * len(log_probs)
    drawn = [Drawn(token, log_prob, float(r or 0.0)) for (log_prob, token, *_), r in zip(log_probs, raw, strict=False)]
    new = int(meta.get("completion_tokens", taken + len(drawn))) - taken
    return drawn[max(0, len(drawn) - new) :]


def _input(meta: Mapping[str, Any]) -> tuple[int, int]:
    """How many tokens the server was given, and how many of them it had keys and values of."""
    return int(meta.get("prompt_tokens") or 0), int(meta.get("cached_tokens") or 0)


def _ended(name: str, reason: Mapping[str, Any], retractions: int) -> Ended:
    end = {"stop": End.STOPPED, "length": End.LENGTH}.get(reason["type"], End.ABORTED)
    text = str(reason.get("message") or "")
    return Ended(name, _kind(text, end) if end is End.ABORTED else end, text, retractions)


def _kind(text: str, otherwise: End) -> End:
    for mark, end in ((EVICTED, End.EVICTED), (NO_ROOM, End.NO_ROOM), (INVALID, End.REFUSED)):
        if mark in text:
            return end
    return otherwise
