"""The server's radix cache, with contexts of joined blocks.

Invariants:
- A context is put in line as a whole or not at all: every branch is in the cache up to its last token, or the request
  is aborted as `npr:evicted`.
- What a request holds, it holds through the server's own locks: the *place* of a context is a node to the server, and
  locking it locks the last node of every branch. So each way on which the server gives back a node (a finish, an abort,
  a retraction) gives back the context too, and none has to be hooked.
- Slots of a context belong to the tree, never to a request. A request adds only its own tokens to the tree, under a
  namespace that depends on all that is before them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    IncLockRefResult,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from npr_sglang.contract import EVICTED, NO_ROOM
from npr_sglang.counters import COUNTERS
from npr_sglang.requests import State, abort, state_of


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request with a context stands in the tree: the last node of every branch, and that of its own tokens."""

    nodes: tuple[Any, ...]


@dataclass
class _Unlock(DecLockRefParams):
    """What gives back the locks of a place: one receipt a node."""

    receipts: tuple[DecLockRefParams, ...] = ()


@dataclass
class _Locked(IncLockRefResult):
    """The locks of a place."""

    receipts: tuple[DecLockRefParams, ...] = ()

    def to_dec_params(self) -> DecLockRefParams:
        """What gives them back."""
        return _Unlock(receipts=self.receipts)


class ForkJoinCache(UnifiedRadixCache):
    """See the module's docstring."""

    def __init__(self, params: CacheInitParams) -> None:
        super().__init__(params)
        COUNTERS.pins = 0

    # --- finding ---

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """What is cached of a request's input, its context included."""
        state = state_of(params.req) if params.req is not None else None
        if params.req is not None and params.req.to_finish is not None:  # its tokens have just been taken from it
            return super().match_prefix(_nothing(params))
        if state is None:
            return super().match_prefix(params)
        if not self._ever_fits(params.req):
            COUNTERS.no_room += 1
            abort(params.req, f"{NO_ROOM}: it has {len(params.key.token_ids)} tokens, the pool {self._capacity}")
            return super().match_prefix(_nothing(params))
        return self._stitch(params, state) if state.has_context else super().match_prefix(params)

    @property
    def _capacity(self) -> int:
        return int(self.token_to_kv_pool_allocator.size)

    def _ever_fits(self, request: Any) -> bool:
        return len(request.origin_input_ids) + len(request.output_ids) < self._capacity

    def _stitch(self, params: MatchPrefixParams, state: State) -> MatchResult:
        found = [self._find(params.key, part.tokens, part.namespace) for part in state.parts]
        if any(len(match.device_indices) < len(part.tokens) for match, part in zip(found, state.parts, strict=True)):
            COUNTERS.evicted += 1
            abort(params.req, f"{EVICTED}: a branch of its context is not in the cache as a whole")
            return super().match_prefix(_nothing(params))
        base, key = state.params.context.length, params.key
        limit = None if key.limit is None else max(0, key.limit - base)
        own = self._find(key, array("q", key.token_ids[base:]), state.namespace, limit)
        indices = torch.cat([*_in_line(state, found), own.device_indices])
        if not state.stitched:
            COUNTERS.stitches += 1
            COUNTERS.stitched_tokens += base
        state.stitched = True
        place = Place((*(match.last_device_node for match in found), own.last_device_node))
        return own._replace(
            device_indices=indices,
            last_device_node=place,
            cache_protected_len=len(indices),
            full_kv_hit_length=len(indices),
        )

    def _find(self, key: RadixKey, tokens: array[int], namespace: str, limit: int | None = None) -> MatchResult:
        wanted = RadixKey(tokens, extra_key=namespace or None, cache_salt=key.cache_salt, limit=limit)
        return super().match_prefix(MatchPrefixParams(key=wanted))

    # --- holding ---

    def inc_lock_ref(self, node_id: Any, skip_lock_components: Any = ()) -> IncLockRefResult:
        """Hold a node, or every node of a place."""
        if not isinstance(node_id, Place):
            return super().inc_lock_ref(node_id, skip_lock_components)
        held = [super(ForkJoinCache, self).inc_lock_ref(node, skip_lock_components) for node in node_id.nodes]
        COUNTERS.pins += 1
        return _Locked(receipts=tuple(result.to_dec_params() for result in held))

    def dec_lock_ref(self, node_id: Any, params: DecLockRefParams, skip_swa: bool = False) -> DecLockRefResult:
        """Give back what `inc_lock_ref` took."""
        if not isinstance(node_id, Place):
            return super().dec_lock_ref(node_id, params, skip_swa)
        if isinstance(params, _Unlock):  # else nothing was taken
            COUNTERS.pins -= 1
            for node, receipt in zip(node_id.nodes, params.receipts, strict=True):
                super().dec_lock_ref(node, receipt, skip_swa)
        return DecLockRefResult()

    # --- keeping ---

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int, **kwargs: Any) -> None:
        """Keep a request's own tokens in the tree, if they were computed behind its whole context."""
        state = state_of(req)
        if state is not None and state.has_context and req.kv.holds_kv:
            if is_insert and state.stitched:
                self._keep_own(req, state, kv_len_to_handle)
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

    def _keep_own(self, req: Any, state: State, length: int) -> None:
        base = state.params.context.length
        if length <= base:
            return
        tokens = (req.origin_input_ids + req.output_ids)[base:length]
        slots = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, base:length].to(dtype=torch.int64, copy=True)
        key = RadixKey(array("q", tokens), extra_key=state.namespace, cache_salt=req.cache_salt)
        protected = max(0, req.kv.cache_protected_len - base)
        self.insert(InsertParams(key=key, value=slots, prev_prefix_len=protected))
        req.kv.cache_protected_len = length  # all of it is the tree's now


def _in_line(state: State, found: list[MatchResult]) -> list[torch.Tensor]:
    """Slots of the context in the order of the input: each block's trunk once, then its branches."""
    slots, match = [], iter(found)
    for block in state.params.context.blocks:
        for index in range(len(block.branches)):
            indices = next(match).device_indices
            slots.append(indices if index == 0 else indices[block.trunk :])
    return slots


def _nothing(params: MatchPrefixParams) -> MatchPrefixParams:
    """A match that finds nothing."""
    return MatchPrefixParams(key=RadixKey(array("q"), params.key.extra_key, cache_salt=params.key.cache_salt))
