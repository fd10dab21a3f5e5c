"""The server's radix cache, with contexts of joined blocks: what is the same in all releases (`releases/`).

Invariants:
- A context is put in line as a whole or not at all: every branch is in the cache up to its last token, or the request
  is aborted as `npr:evicted`.
- What a request holds, it holds through the server's own locks: the *place* of a request is a node to the server, and
  locking it locks the last node of every branch. So each way on which the server gives back a node (a finish, an abort,
  a retraction) gives back the context too, and none has to be hooked.
- A context is looked up once while requests hold it, however many: it is locked, so nothing of it can go.
- Slots of a context belong to the tree, never to a request. A request adds only its own tokens to the tree, under a
  namespace that depends on all that is before them.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Sequence
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

from npr_sglang.contract import EVICTED, NO_ROOM, Context
from npr_sglang.counters import COUNTERS
from npr_sglang.requests import State, abort, state_of

Key = tuple[str, Any]
"""What a context is known by: the namespace behind it, which depends on all of its tokens, and the request's salt."""


@dataclass(slots=True, eq=False)
class Line:
    """A context in line: what all requests share that stand on it.

    Attributes:
        nodes: the last node of every branch.
        slots: int64, of the whole context in the order of an input.
        holders: how many requests hold it.
        receipts: what gives back the locks of its nodes, while it is held.
    """

    nodes: tuple[Any, ...]
    slots: torch.Tensor
    holders: int = 0
    receipts: tuple[DecLockRefParams, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a request with a context stands in the tree.

    Attributes:
        key: of its context.
        line: its context.
        own: the node of what is cached of its own tokens.
    """

    key: Key
    line: Line
    own: Any


@dataclass
class _Unlock(DecLockRefParams):
    """What gives back a place."""

    own: DecLockRefParams | None = None


@dataclass
class _Locked(IncLockRefResult):
    """A place that is held."""

    own: DecLockRefParams | None = None

    def to_dec_params(self) -> DecLockRefParams:
        """What gives it back."""
        return _Unlock(own=self.own)


class ForkJoinCache(UnifiedRadixCache):
    """See the module's docstring."""

    def __init__(self, params: CacheInitParams) -> None:
        super().__init__(params)
        COUNTERS.pins = 0

    def reset(self) -> None:
        """Forget everything; nothing is held."""
        super().reset()
        self._held: dict[Key, Line] = {}

    # --- finding ---

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """What is cached of a request's input, its context included."""
        state = state_of(params.req) if params.req is not None else None
        if params.req is not None and params.req.to_finish is not None:
            if (
                state is not None
            ):  # aborted while it ran, and retracted before it could end: it has all its tokens still
                abort(params.req, "it was aborted")
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
        key, context = (state.namespace, params.key.cache_salt), state.params.context
        line = self._held.get(key) or self._look_up(params, context)
        if line is None:
            COUNTERS.evicted += 1
            abort(params.req, f"{EVICTED}: a branch of its context is not in the cache as a whole")
            return super().match_prefix(_nothing(params))
        base = context.length
        if not state.stitched:
            COUNTERS.stitches += 1
            COUNTERS.stitched_tokens += base
        state.stitched = True
        limit = None if params.key.limit is None else max(0, params.key.limit - base)
        own = self._find(params.key, array("q", params.key.token_ids[base:]), state.namespace, limit)
        length = base + self.found(own)
        place = Place(key, line, own.last_device_node)
        result = own._replace(last_device_node=place, cache_protected_len=length, full_kv_hit_length=length)
        return self.put_in_line(result, line, own)

    def _look_up(self, params: MatchPrefixParams, context: Context) -> Line | None:
        """A context as it is in the tree; None if not all of it is."""
        found = []
        for part in context.parts(params.req.origin_input_ids, params.req.extra_key or ""):
            match = self._find(params.key, part.tokens, part.namespace)
            if self.found(match) < len(part.tokens):
                return None
            found.append(match)
        COUNTERS.look_ups += 1
        slots = in_line(context, [self.slots(match) for match in found])
        return Line(tuple(match.last_device_node for match in found), slots)

    @abstractmethod
    def found(self, match: MatchResult) -> int:
        """How many tokens a match has found in the memory of the device."""

    @abstractmethod
    def slots(self, match: MatchResult) -> torch.Tensor:
        """The slots of what a match has just found, int64."""

    @abstractmethod
    def put_in_line(self, result: MatchResult, line: Line, own: MatchResult) -> MatchResult:
        """The result of a request with a context, in all but what has been found: that is the line and its own."""

    def _find(self, key: RadixKey, tokens: array[int], namespace: str, limit: int | None = None) -> MatchResult:
        wanted = RadixKey(tokens, extra_key=namespace or None, cache_salt=key.cache_salt, limit=limit)
        return super().match_prefix(MatchPrefixParams(key=wanted))

    # --- holding ---

    def inc_lock_ref(self, node_id: Any, skip_lock_components: Any = ()) -> IncLockRefResult:
        """Hold a node, or every node of a place."""
        if not isinstance(node_id, Place):
            return super().inc_lock_ref(node_id, skip_lock_components)
        line = node_id.line
        if line.holders == 0:
            held = [super(ForkJoinCache, self).inc_lock_ref(node, skip_lock_components) for node in line.nodes]
            line.receipts = tuple(each.to_dec_params() for each in held)
            self._held.setdefault(node_id.key, line)
        line.holders += 1
        COUNTERS.pins += 1
        return _Locked(own=super().inc_lock_ref(node_id.own, skip_lock_components).to_dec_params())

    def dec_lock_ref(self, node_id: Any, params: DecLockRefParams, skip_swa: bool = False) -> DecLockRefResult:
        """Give back what `inc_lock_ref` took."""
        if not isinstance(node_id, Place):
            return super().dec_lock_ref(node_id, params, skip_swa)
        if not (isinstance(params, _Unlock) and params.own is not None):  # nothing was taken
            return DecLockRefResult()
        line = node_id.line
        line.holders -= 1
        COUNTERS.pins -= 1
        if line.holders == 0:
            if self._held.get(node_id.key) is line:
                del self._held[node_id.key]
            for node, receipt in zip(line.nodes, line.receipts, strict=True):
                super().dec_lock_ref(node, receipt, skip_swa)
        return super().dec_lock_ref(node_id.own, params.own, skip_swa)

    # --- keeping ---

    def keep_own(self, req: Any, state: State, length: int) -> None:
        """Keep those of a request's first `length` tokens that are its own; they were computed behind its context."""
        base = state.params.context.length
        if length <= base:
            return
        tokens = (req.origin_input_ids + req.output_ids)[base:length]
        slots = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, base:length].to(dtype=torch.int64, copy=True)
        key = RadixKey(array("q", tokens), extra_key=state.namespace, cache_salt=req.cache_salt)
        protected = max(0, req.kv.cache_protected_len - base)
        self.insert(InsertParams(key=key, value=slots, prev_prefix_len=protected))
        req.kv.cache_protected_len = length  # all of it is the tree's now


def in_line(context: Context, branches: Sequence[torch.Tensor]) -> torch.Tensor:
    """Slots in the order of an input: each block's trunk once, then its branches.

    Args:
        branches: int64, the slots of every branch behind its trunk.
    """
    ordered, rest = [], iter(branches)
    for block in context.blocks:
        for index in range(len(block.branches)):
            branch = next(rest)
            ordered.append(branch if index == 0 else branch[block.trunk :])
    return torch.cat(ordered)


def _nothing(params: MatchPrefixParams) -> MatchPrefixParams:
    """A match that finds nothing."""
    return MatchPrefixParams(key=RadixKey(array("q"), params.key.extra_key, cache_salt=params.key.cache_salt))
