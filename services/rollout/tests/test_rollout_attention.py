"""The attention backends agree with each other, and a token's result does not depend on what else is in the pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npr_rollout.engine.attention.cascade_cpu import CascadeAttention
from npr_rollout.engine.attention.flash_infer import LevelArrays, level_arrays
from npr_rollout.engine.attention.plan import AttentionPlan, attention_order, make_plan
from npr_rollout.engine.attention.sdpa import SdpaAttention
from npr_rollout.engine.kv_pool import KvPool, KvShape
from npr_rollout.engine.page_table import PageTables

HEADS, KV_HEADS, SIZE = 6, 2, 16
SCALE = SIZE**-0.5
Run = tuple[int, int, int]
"""Row, tokens, and what the last of them sees."""


@dataclass
class Scene:
    """Rows forked from each other, and the runs that are fed in one pass."""

    tables: PageTables
    runs: list[Run]

    def plan(self, runs: Sequence[Run]) -> AttentionPlan:
        rows, counts, lengths = np.asarray(runs, np.int64).T
        return make_plan(self.tables, rows, counts, lengths)

    def tensors(self, runs: Sequence[Run]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of each run's tokens; a token's are the same in every pass."""
        parts = []
        for row, count, length in runs:
            made = []
            for position in range(length - count, length):
                generator = torch.Generator().manual_seed(1000 * row + position)
                made.append(torch.randn(HEADS + 2 * KV_HEADS, SIZE, generator=generator))
            parts.append(torch.stack(made))
        query, key, value = torch.cat(parts).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        return query, key, value


def scene(seed: int, dtype: torch.dtype = torch.float32) -> Scene:
    """Three generations of rows with their own tokens; the youngest of each family are fed, a few tokens at once."""
    random = np.random.default_rng(seed)
    pool = KvPool(KvShape(1, KV_HEADS, SIZE, dtype, torch.device("cpu")), 400, 4)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    tables = PageTables(pool)
    fed = []
    for _ in range(random.integers(1, 4)):
        prompt = tables.open()
        tables.extend(prompt, int(random.integers(1, 150)))
        trunk = tables.fork(prompt)
        tables.extend(trunk, int(random.integers(1, 30)))
        branches = [tables.fork(trunk) for _ in range(random.integers(0, 4))]
        for branch in branches:
            tables.extend(branch, int(random.integers(1, 90)))
        fed += branches or [trunk]
    rows = np.asarray(fed, np.int64)
    rows = rows[attention_order(tables, rows)]
    own = tables.length[rows] - tables.prefix[rows]
    counts = np.minimum(own, random.integers(1, 9, len(rows)))
    runs = [
        (int(row), int(count), int(length))
        for row, count, length in zip(rows, counts, tables.length[rows], strict=True)
    ]
    return Scene(tables, runs)


def attend(backend: CascadeAttention | SdpaAttention, made: Scene, runs: Sequence[Run]) -> torch.Tensor:
    query, key, value = made.tensors(runs)
    return backend.prepare(made.plan(runs))(0, query, key, value, SCALE)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31))
def test_the_cascade_equals_sdpa(seed: int) -> None:
    made = scene(seed)
    pool = made.tables.pool
    cascade, sdpa = (attend(kind(pool), made, made.runs) for kind in (CascadeAttention, SdpaAttention))
    assert float((cascade - sdpa).abs().max()) < 1e-5


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_in_half_precision_only_the_pool_is_rounded(seed: int) -> None:
    made = scene(seed, torch.bfloat16)
    pool = made.tables.pool
    cascade, sdpa = (attend(kind(pool), made, made.runs) for kind in (CascadeAttention, SdpaAttention))
    assert float((cascade - sdpa).abs().max()) < 1e-5


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31))
def test_batch_mates_change_no_bit(seed: int) -> None:
    made = scene(seed)
    backend = CascadeAttention(made.tables.pool)
    together = attend(backend, made, made.runs)
    begin = 0
    for run in made.runs:
        alone = attend(backend, made, [run])
        assert torch.equal(alone, together[begin : begin + run[1]])
        begin += run[1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31))
def test_feeding_in_parts_changes_no_bit(seed: int) -> None:
    made = scene(seed)
    backend = CascadeAttention(made.tables.pool)
    whole = attend(backend, made, made.runs)
    parts = [
        attend(backend, made, [(row, 1, length - count + 1 + i)])
        for row, count, length in made.runs
        for i in range(count)
    ]
    assert torch.equal(whole, torch.cat(parts))


def test_any_number_of_threads_gives_the_same_bits() -> None:
    made = scene(7)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(attend(CascadeAttention(made.tables.pool), made, made.runs))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31))
def test_what_flash_infer_is_handed_computes_the_same(seed: int) -> None:
    """Its levels, computed densely and merged by log-sum-exp as `merge_state` does, equal SDPA."""
    made = scene(seed)
    pool = made.tables.pool
    expected = attend(SdpaAttention(pool), made, made.runs)
    query, _, _ = made.tensors(made.runs)
    out = torch.zeros(query.shape)
    mass = torch.full(query.shape[:2], float("-inf"))
    for level in level_arrays(made.plan(made.runs)):
        part, part_mass = _level(level, query, pool)
        queries = torch.from_numpy(level.queries)
        merged = torch.logaddexp(mass[queries], part_mass)
        old, new = (mass[queries] - merged).exp(), (part_mass - merged).exp()
        out[queries] = out[queries] * old[..., None] + part * new[..., None]
        mass[queries] = merged
    assert float((out - expected).abs().max()) < 1e-5


def _level(level: LevelArrays, query: torch.Tensor, pool: KvPool) -> tuple[torch.Tensor, torch.Tensor]:
    """What FlashInfer's documentation says that a ragged batch of paged attention is."""
    outs, masses = [], []
    queries = torch.from_numpy(level.queries)
    for item in range(len(level.kv_ends) - 1):
        mine = query[queries[level.query_ends[item] : level.query_ends[item + 1]]]
        slots = torch.from_numpy(level.kv_slots[level.kv_ends[item] : level.kv_ends[item + 1]].astype(np.int64))
        keys, values = (
            tensor[0][slots].repeat_interleave(HEADS // KV_HEADS, dim=1) for tensor in (pool.keys, pool.values)
        )
        scores = torch.einsum("qhd,khd->qhk", mine, keys) * SCALE
        if level.causal:
            later = torch.ones(len(mine), len(slots), dtype=torch.bool).triu(1 + len(slots) - len(mine))
            scores = scores.masked_fill(later[:, None], float("-inf"))
        masses.append(scores.logsumexp(dim=-1))
        outs.append(torch.einsum("qhk,khd->qhd", scores.softmax(dim=-1), values))
    return torch.cat(outs), torch.cat(masses)


def test_a_shared_segment_is_read_once() -> None:
    pool = KvPool(KvShape(1, KV_HEADS, SIZE, torch.float32, torch.device("cpu")), 400, 4)
    tables = PageTables(pool)
    trunk = tables.open()
    tables.extend(trunk, 100)
    branches = [tables.fork(trunk) for _ in range(8)]
    for branch in branches:
        tables.extend(branch, 10)
    rows = np.asarray(branches, np.int64)
    plan = make_plan(tables, rows, np.ones(8, np.int64), tables.length[rows])
    assert plan.tokens_read == 100 + 8 * 10
    assert plan.tokens_attended == 8 * 110


@pytest.mark.parametrize("generations", [1, 2, 3, 5])
def test_ancestors_of_any_depth_are_seen(generations: int) -> None:
    pool = KvPool(KvShape(1, KV_HEADS, SIZE, torch.float32, torch.device("cpu")), 400, 4)
    tables = PageTables(pool)
    row = tables.open()
    tables.extend(row, 3)
    for _ in range(generations):
        row = tables.fork(row)
        tables.extend(row, 5)
    made = Scene(tables, [(row, 1, int(tables.length[row]))])
    cascade, sdpa = (attend(kind(pool), made, made.runs) for kind in (CascadeAttention, SdpaAttention))
    assert made.plan(made.runs).tokens_read == 3 + 5 * generations
    assert torch.allclose(cascade, sdpa, atol=1e-5)
