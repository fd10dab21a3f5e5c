"""One forward pass over a ragged batch.

Invariant: the model is any decoder-only `transformers` model that follows the attention interface; it is called, never
changed beyond the name of its attention function.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npr_rollout.engine.attention import PAGED_ATTENTION, AttentionGroup, PagedBatch, check_supported
from npr_rollout.engine.feeding import Chunk
from npr_rollout.engine.kv_pool import KvPool, KvShape
from npr_rollout.engine.page_table import IntArray, PageTables
from npr_rollout.engine.trajectory import Span

_MAX_SCORES = 1 << 26  # elements of one group's mask, so that a batch of long chunks is cut
_MIN_SPLIT = 32  # rows; smaller groups of single tokens are not worth a second kernel call


def kv_shape(model: Any) -> KvShape:
    """The KV cost of a model."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weight = model.get_input_embeddings().weight
    return KvShape(config.num_hidden_layers, config.num_key_value_heads, head_dim, weight.dtype, weight.device)


class ModelRunner:
    """Feeds spans and chunks through the model and returns logits where something is sampled."""

    def __init__(self, model: Any, pool: KvPool, tables: PageTables) -> None:
        check_supported(model.config)
        model.set_attn_implementation(PAGED_ATTENTION)
        self._model = model.eval()
        self._pool = pool
        self._tables = tables
        self._device = pool.shape.device

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], chunks: Sequence[Chunk]) -> tuple[Tensor, list[Span]]:
        """Run the model over the last token of each span and over all chunks.

        Returns:
            float32 logits [N, V], and the N spans they belong to: `spans`, then those of the chunks that sample.
        """
        singles = [chunk for chunk in chunks if len(chunk.tokens) == 1]
        longer = sorted((chunk for chunk in chunks if len(chunk.tokens) > 1), key=lambda chunk: len(chunk.tokens))
        ordered = [*singles, *longer]
        ids, positions = _flatten(spans, ordered)
        batch = self._batch(spans, singles, longer)
        rows, sampling = _sampling_rows(spans, ordered)
        if not sampling:
            rows = [len(ids) - 1]
        output = self._model(
            input_ids=self._tensor(ids)[None],
            position_ids=self._tensor(positions)[None],
            use_cache=False,
            logits_to_keep=self._tensor(np.asarray(rows, np.int64)),
            npr_batch=batch,
        )
        return output.logits[0, : len(sampling)].float(), sampling

    def _batch(self, spans: Sequence[Span], singles: Sequence[Chunk], longer: Sequence[Chunk]) -> PagedBatch:
        span_rows = np.fromiter((span.row for span in spans), np.int64, len(spans))
        rows = np.concatenate([span_rows, np.asarray([chunk.row for chunk in singles], np.int64)])
        lengths = np.concatenate(
            [self._tables.length[span_rows], np.asarray([chunk.kv_length for chunk in singles], np.int64)]
        )
        written = [self._tables.slots[rows, lengths - 1]]
        written += [self._tables.slots[c.row, c.kv_length - len(c.tokens) : c.kv_length] for c in longer]
        return PagedBatch(
            self._pool,
            self._tensor(np.concatenate(written).astype(np.int64)),
            tuple(self._single_groups(rows, lengths)),
            tuple(self._chunk_groups(longer, len(rows))),
        )

    def _single_groups(self, rows: IntArray, lengths: IntArray) -> list[AttentionGroup]:
        """Rows that feed one token, split in two by length where padding would cost much."""
        if len(rows) == 0:
            return []
        order = np.argsort(lengths, kind="stable")
        parts = [order] if len(rows) < 2 * _MIN_SPLIT else np.array_split(order, 2)
        return [self._single_group(rows[part], lengths[part], part) for part in parts]

    def _single_group(self, rows: IntArray, lengths: IntArray, targets: IntArray) -> AttentionGroup:
        longest = int(lengths.max())
        slots = self._tensor(self._tables.slots[rows, :longest].astype(np.int64))
        hidden = torch.arange(longest, device=self._device)[None] >= self._tensor(lengths)[:, None]
        index = self._tensor(targets)
        return AttentionGroup(index[:, None], slots, self._additive(hidden)[:, None, None], index, index)

    def _chunk_groups(self, chunks: Sequence[Chunk], first: int) -> list[AttentionGroup]:
        """Chunks sorted by length, grouped so that padding at most doubles a chunk."""
        groups: list[AttentionGroup] = []
        begin = 0
        while begin < len(chunks):
            end = _group_end(chunks, begin)
            groups.append(self._chunk_group(chunks[begin:end], first))
            first += sum(len(chunk.tokens) for chunk in chunks[begin:end])
            begin = end
        return groups

    def _chunk_group(self, chunks: Sequence[Chunk], first: int) -> AttentionGroup:
        counts = np.asarray([len(chunk.tokens) for chunk in chunks], np.int64)
        lengths = np.asarray([chunk.kv_length for chunk in chunks], np.int64)
        width, longest = int(counts.max()), int(lengths.max())
        column = np.arange(width)
        real = column[None] < counts[:, None]
        starts = first + np.concatenate([[0], np.cumsum(counts)[:-1]])
        queries = np.where(real, starts[:, None] + column[None], starts[:, None])
        slots = self._tables.slots[[chunk.row for chunk in chunks], :longest].astype(np.int64)
        flat = np.flatnonzero(real)
        return AttentionGroup(
            self._tensor(queries),
            self._tensor(slots),
            self._chunk_mask(counts, lengths, width, longest),
            self._tensor(flat),
            self._tensor(queries.reshape(-1)[flat]),
        )

    def _chunk_mask(self, counts: IntArray, lengths: IntArray, width: int, longest: int) -> Tensor | None:
        """Each query sees its row up to itself; the padding's queries see as much as the row's last one."""
        if bool(np.all(counts == lengths)) and bool(np.all(counts == width)):
            return None
        column = np.minimum(np.arange(width)[None], counts[:, None] - 1)
        seen = self._tensor(lengths[:, None] - counts[:, None] + column + 1)
        hidden = torch.arange(longest, device=self._device)[None, None] >= seen[:, :, None]
        return self._additive(hidden)[:, None]

    def _additive(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self._pool.shape.dtype, device=self._device).masked_fill_(
            hidden, float("-inf")
        )

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _group_end(chunks: Sequence[Chunk], begin: int) -> int:
    end, longest = begin, 0
    while end < len(chunks):
        longest = max(longest, chunks[end].kv_length)
        width = len(chunks[end].tokens)
        too_wide = width > 2 * len(chunks[begin].tokens)
        if end > begin and (too_wide or (end - begin + 1) * width * longest > _MAX_SCORES):
            break
        end += 1
    return end


def _flatten(spans: Sequence[Span], chunks: Sequence[Chunk]) -> tuple[IntArray, IntArray]:
    """Ids and positions of all tokens, the spans' last ones first."""
    ids = [span.tokens[-1] for span in spans]
    ids.extend(chain.from_iterable(chunk.tokens for chunk in chunks))
    positions = [span.end - 1 for span in spans]
    for chunk in chunks:
        positions.extend(range(chunk.position, chunk.position + len(chunk.tokens)))
    return np.asarray(ids, np.int64), np.asarray(positions, np.int64)


def _sampling_rows(spans: Sequence[Span], chunks: Sequence[Chunk]) -> tuple[list[int], list[Span]]:
    """Indices of the tokens whose logits are sampled from, and their spans."""
    rows, sampling = list(range(len(spans))), list(spans)
    end = len(spans)
    for chunk in chunks:
        end += len(chunk.tokens)
        if chunk.span is not None:
            rows.append(end - 1)
            sampling.append(chunk.span)
    return rows, sampling
