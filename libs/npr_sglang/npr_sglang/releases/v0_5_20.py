"""SGLang 0.5.20: a match tells slots, and a request is kept and given back by one call, `cache_finished_req`."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from npr_sglang.cache import ForkJoinCache, Line
from npr_sglang.requests import state_of


class Cache(ForkJoinCache):
    """See the module's docstring."""

    def found(self, match: MatchResult) -> int:
        """How many tokens a match has found."""
        return len(match.device_indices)

    def slots(self, match: MatchResult) -> torch.Tensor:
        """The slots of what a match has found."""
        slots: torch.Tensor = match.device_indices
        return slots

    def put_in_line(self, result: MatchResult, line: Line, own: MatchResult) -> MatchResult:
        """A result with the slots of all that was found."""
        return result._replace(device_indices=torch.cat([line.slots, own.device_indices]))

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int, **kwargs: Any) -> None:
        """Keep a request's own tokens in the tree, if they were computed behind its whole context."""
        state = state_of(req)
        if state is not None and state.has_context and req.kv.holds_kv:
            if is_insert and state.stitched:
                self.keep_own(req, state, kv_len_to_handle)
            is_insert = False
        super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle, **kwargs)

    def cache_unfinished_req(self, req: Any, chunked: bool = False, **kwargs: Any) -> None:
        """Note how far a request has come; what has a context stays out of the tree until it is finished."""
        state = state_of(req)
        if state is None or not state.has_context:
            super().cache_unfinished_req(req, chunked, **kwargs)
            return
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(req.get_fill_ids())]
        req.prefix_indices = row.to(dtype=torch.int64, copy=True)
