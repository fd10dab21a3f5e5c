"""One forward pass of the model over what the feeder has planned.

Invariants:
- Tokens of the pass stand in the order that the attention plan wants; logits come back only for spans that sample.
- Nothing is kept between passes but the model and the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npr_rollout.engine.attention.interface import check_supported, make_backend, pool_dtype
from npr_rollout.engine.attention.plan import AttentionPlan, attention_order, make_plan
from npr_rollout.engine.config import AttentionKind, KvDtype
from npr_rollout.engine.decoder import make_decoder
from npr_rollout.engine.feeding import Chunk
from npr_rollout.engine.kv_pool import KvPool, KvShape
from npr_rollout.engine.page_table import IntArray, PageTables
from npr_rollout.record.trajectory import Span


def kv_shape(model: Any, kv_dtype: KvDtype = KvDtype.AUTO) -> KvShape:
    """The KV cost of a model."""
    weight = model.get_input_embeddings().weight
    return KvShape.of(model.config, pool_dtype(kv_dtype, weight.dtype, weight.device), weight.device)


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass, planned.

    Attributes:
        ids: int64 [T].
        positions: int64 [T], for RoPE.
        rows: int64 [N], indices of the tokens after which something is sampled.
        spans: the N spans that sample there.
    """

    ids: IntArray
    positions: IntArray
    rows: IntArray
    spans: list[Span]
    attention: AttentionPlan


class ModelRunner:
    """Feeds spans and chunks through the model and returns logits where something is sampled."""

    def __init__(self, model: Any, pool: KvPool, tables: PageTables, attention: AttentionKind) -> None:
        check_supported(model.config)
        self._backend = make_backend(attention, pool)
        self._decoder = make_decoder(model, self._backend)
        self._tables = tables
        self._device = pool.shape.device

    def plan(self, spans: Sequence[Span], chunks: Sequence[Chunk]) -> Pass:
        """Lay out the last token of each span, and all chunks."""
        rows = _ints([*(span.row for span in spans), *(chunk.row for chunk in chunks)])
        order = attention_order(self._tables, rows)
        counts = _ints([*([1] * len(spans)), *(len(chunk.tokens) for chunk in chunks)])
        lengths = np.concatenate([self._tables.length[rows[: len(spans)]], _ints([c.kv_length for c in chunks])])
        first = _ints([*(span.end - 1 for span in spans), *(chunk.position for chunk in chunks)])
        samplers = [*spans, *(chunk.span for chunk in chunks)]
        attention = make_plan(self._tables, rows[order], counts[order], lengths[order])
        ends = attention.runs[:, 3]
        sampling = [
            (end - 1, span) for end, i in zip(ends.tolist(), order.tolist(), strict=True) if (span := samplers[i])
        ]
        return Pass(
            _tokens(spans, chunks, order),
            _positions(first[order], counts[order]),
            _ints([row for row, _ in sampling]),
            [span for _, span in sampling],
            attention,
        )

    @torch.inference_mode()
    def forward(self, planned: Pass) -> Tensor:
        """Run the model; float32 logits [N, V] for the spans of the pass."""
        sampling = planned.rows if len(planned.rows) else _ints([len(planned.ids) - 1])
        ids, positions, rows = map(self._tensor, (planned.ids, planned.positions, sampling))
        logits = self._decoder.logits(ids, positions, rows, self._backend.prepare(planned.attention))
        return logits[: len(planned.rows)].float()

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _tokens(spans: Sequence[Span], chunks: Sequence[Chunk], order: Any) -> IntArray:
    last = [span.tokens[-1] for span in spans]
    if not chunks:
        tokens: IntArray = _ints(last)[order]
        return tokens
    runs: list[Sequence[int]] = [*([token] for token in last), *(chunk.tokens for chunk in chunks)]
    return _ints(list(chain.from_iterable(runs[i] for i in order.tolist())))


def _positions(first: IntArray, counts: IntArray) -> IntArray:
    """Positions of all tokens: each run counts up from its first."""
    if bool((counts == 1).all()):
        return first
    begins = np.cumsum(counts) - counts
    positions: IntArray = np.arange(int(counts.sum())) + np.repeat(first - begins, counts)
    return positions


def _ints(values: Sequence[Any]) -> IntArray:
    return np.asarray(values, np.int64)
