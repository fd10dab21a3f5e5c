"""SGLang 0.5.23: a match tells a length, and slots are read off the tree when a request gets its row.

`checkpoint` keeps what a request has computed, and is called before the server itself gives back the row and the locks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from npr_sglang.cache import ForkJoinCache, Line, Place
from npr_sglang.requests import state_of


class Cache(ForkJoinCache):
    """See the module's docstring."""

    def found(self, match: MatchResult) -> int:
        """How many tokens a match has found."""
        return int(match.device_prefix_len)

    def slots(self, match: MatchResult) -> torch.Tensor:
        """The slots of what a match has just found."""
        slots: torch.Tensor = self.path_device_indices(match.last_device_node)
        return slots

    def put_in_line(self, result: MatchResult, line: Line, own: MatchResult) -> MatchResult:
        """A result with the length of all that was found; its slots are asked for by `prefix_device_indices`."""
        return result._replace(device_prefix_len=len(line.slots) + self.found(own))

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        """Slots of what was found of a request's input, int64; the request holds its place."""
        place = req.last_node
        if not isinstance(place, Place):
            slots: torch.Tensor = super().prefix_device_indices(req)
            return slots
        return torch.cat([place.line.slots, self.path_device_indices(place.own)])[: req.prefix_len]

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Keep a request's tokens in the tree; of one with a context its own tokens, once it is finished."""
        state = state_of(req)
        if state is None or not state.has_context:
            super().checkpoint(req, up_to=up_to, **kwargs)
        elif req.finished() and state.stitched:
            self.keep_own(req, state, up_to)


def around_finishes_by_length(original: Callable[..., bool], request: Any) -> bool:
    """`Req.next_output_finishes_by_length`: not one that is to be sealed and has not drawn its last token.

    The server leaves those that will finish out of the next step, under overlapped scheduling; but that step is the one
    that seals.
    """
    state = state_of(request)
    if state is not None and state.params.seal and state.sealing is None:
        return False
    return original(request)
