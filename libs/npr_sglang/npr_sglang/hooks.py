"""What the plug-in changes in the server beside its cache and its sampler: three functions.

Invariants:
- A request that is not ours goes through all of them unchanged.
- RoPE positions of a request lie `Context.hidden` below its places in the input. Attention needs no change: it reads as
  many slots as there are, in any order, and the keys carry their positions.
- A request that is to be sealed finishes one step after its last token: that step writes the token's keys and values,
  and what is drawn in it is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from npr_sglang.contract import STATE_KEY
from npr_sglang.counters import COUNTERS
from npr_sglang.requests import State, state_of
from npr_sglang.sampler import SAMPLING_ROWS, SamplingRows


def after_init_forward_batch(made: Any, _cls: Any, batch: Any, *_: Any, **__: Any) -> None:
    """`ForwardBatch.init_new`: the positions, and what the sampler has to know of each row."""
    states = [state_of(request) for request in batch.reqs or ()]
    is_ours = any(states) and not made.forward_mode.is_idle()
    hidden = [state.params.context.hidden if state is not None else 0 for state in states]
    if is_ours:
        _move_positions(made, hidden)
    if made.sampling_info is not None:  # it outlives a batch: rows of ours that have ended must not stay
        rows = _sampling_rows(made, batch, states, hidden) if is_ours else None
        setattr(made.sampling_info, SAMPLING_ROWS, rows)


def _move_positions(made: Any, hidden: list[int]) -> None:
    if made.positions is None or not any(hidden):
        return
    offsets = torch.tensor(hidden, dtype=made.positions.dtype, device=made.positions.device)
    if made.forward_mode.is_decode():
        made.positions[: len(hidden)] -= offsets
    elif made.forward_mode.is_extend():
        made.positions -= torch.repeat_interleave(offsets, made.extend_seq_lens.to(torch.int64))


def _sampling_rows(made: Any, batch: Any, states: list[State | None], hidden: list[int]) -> SamplingRows:
    lengths = (made.seq_lens_cpu if made.seq_lens_cpu is not None else made.seq_lens.cpu()).tolist()
    return SamplingRows(
        requests=list(batch.reqs),
        states=states,
        positions=[length - less for length, less in zip(lengths, hidden, strict=True)],
        places=[length - len(r.origin_input_ids) for length, r in zip(lengths, batch.reqs, strict=True)],
        starts=not made.forward_mode.is_decode(),
    )


def around_update_finish_state(original: Callable[..., None], request: Any, new_accepted_len: int = 1) -> None:
    """`Req.update_finish_state`: a request that is to be sealed finishes one step later."""
    state = state_of(request)
    if state is None or not state.params.seal or request.finished():
        original(request, new_accepted_len)
        return
    if state.sealing is not None and request.to_finish is None:
        request.finished_reason, request.finished_len = state.sealing
        COUNTERS.sealed += 1
        return
    aborted = request.to_finish is not None
    original(request, new_accepted_len)
    if request.finished() and not aborted:
        state.sealing = request.finished_reason, request.finished_len
        request.finished_reason = request.finished_len = None


def after_get_internal_state(answer: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """`Scheduler.get_internal_state`: the plug-in's counters, and what the KV pool holds."""
    pool, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    told = COUNTERS.to_dict() | {
        "pool_tokens": int(pool.size),
        "free_tokens": int(pool.available_size()),
        "cached_tokens": int(tree.evictable_size()),
        "held_tokens": int(tree.protected_size()),
        "running": len(_in_batches(scheduler.running_batch, scheduler.last_batch)),
        "waiting": len(scheduler.waiting_queue),
    }
    answer.internal_state[STATE_KEY] = told


def _in_batches(*batches: Any) -> set[int]:
    """Requests of batches. Those of the last one may hold slots until its results are taken, finished or not."""
    return {id(request) for batch in batches if batch is not None for request in batch.reqs or ()}
