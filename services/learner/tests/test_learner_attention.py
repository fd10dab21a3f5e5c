"""Attention over packed trees, each way against a dense mask that is written pair by pair from the topologies."""

import math
import shutil
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

from npr_learner.attention.dense import DenseAttention
from npr_learner.attention.flex import BLOCK, FlexAttention, bucket
from npr_learner.attention.forest import holes_of
from npr_learner.attention.interface import Attend
from npr_learner.attention.lean import LeanAttention
from npr_learner.attention.pieces import batched, pieces_of
from npr_learner.attention.testing import random_rows, tree
from npr_learner.packing import Family, Packed, families_of, pack
from npr_learner.testing import WORDS, qwen3

CPU = torch.device("cpu")
SQUARES = (0, 16, 64, 10_000)
"""Longest masked squares: from none to all of it in one."""


def packs(seed: int, count: int = 6, *, longest_step: int = 30) -> list[Packed]:
    """Packed rows, with and without shared prompts."""
    generator = np.random.default_rng(seed)
    found = []
    for index in range(count):
        rows = random_rows(generator, int(generator.integers(1, 9)), longest_step=longest_step)
        found.append(pack(families_of(rows, share_prompts=index % 2 == 0)))
    return found


def origins(families: list[Family]) -> list[tuple[int | None, int]]:
    """For each packed token its row, None where several share it, and its index there."""
    found: list[tuple[int | None, int]] = []
    number = 0
    for family in families:
        found += [(None, index) for index in range(family.prompt_length)]
        for row in family.rows:
            found += [(number, index) for index in range(family.prompt_length, len(row))]
            number += 1
    return found


def test_a_packed_row_shows_each_row_itself_and_nothing_else() -> None:
    generator = np.random.default_rng(0)
    for share in (False, True) * 5:
        families = families_of(random_rows(generator, 5, longest_step=8), share_prompts=share)
        packed = pack(families)
        visible = holes_of(packed.forest, len(packed.token_ids)).visible(0, len(packed.token_ids))
        places = origins(families)
        assert len(places) == len(packed.token_ids)
        for number, row in enumerate(packed.rows):
            family = next(family for family in families if any(row is other for other in family.rows))
            start = places.index((number, family.prompt_length))
            prompt = places[:start].index((None, 0), _family_start(families, family)) if family.prompt_length else start
            at = [*range(prompt, prompt + family.prompt_length), *range(start, start + len(row) - family.prompt_length)]
            np.testing.assert_array_equal(packed.token_ids[at], row.token_ids)
            np.testing.assert_array_equal(packed.positions[at], row.topology.positions)
            np.testing.assert_array_equal(visible[np.ix_(at, at)], row.topology.dense_mask())
            others = np.setdiff1d(np.arange(len(places)), at)
            assert not visible[np.ix_(at[family.prompt_length :], others)].any()


def _family_start(families: list[Family], family: Family) -> int:
    return sum(len(other) for other in families[: next(i for i, other in enumerate(families) if other is family)])


def test_sources_are_the_tokens_that_the_trained_ones_follow() -> None:
    rows = random_rows(np.random.default_rng(1), 12)
    for share in (False, True):
        packed = pack(families_of(rows, share_prompts=share))
        expected = [row.token_ids[row.topology.predecessors[row.trained]] for row in packed.rows]
        positions = [row.topology.positions[row.topology.predecessors[row.trained]] for row in packed.rows]
        np.testing.assert_array_equal(packed.token_ids[packed.sources], np.concatenate(expected))
        np.testing.assert_array_equal(packed.positions[packed.sources], np.concatenate(positions))


def test_prompts_are_shared_by_equal_prompts_only() -> None:
    rows = random_rows(np.random.default_rng(2), 20)
    families = families_of(rows, share_prompts=True)
    assert 1 < len(families) <= 3
    for family in families:
        assert len({row.token_ids[: row.topology.prompt_length].tobytes() for row in family.rows}) == 1
        assert len(family) == len(pack([family]).token_ids) < sum(map(len, family.rows))
    alone = families_of(rows, share_prompts=False)
    assert [family.rows[0] for family in alone] == rows


@pytest.mark.parametrize("limit", SQUARES)
def test_pieces_hold_every_visible_pair_once(limit: int) -> None:
    for packed in packs(3, 12):
        size = len(packed.token_ids)
        holes = holes_of(packed.forest, size)
        pieces = pieces_of(packed.forest, limit)
        times = np.zeros((size, size), np.int64)
        for q_start, q_end, k_start, k_end in pieces.rectangles:
            times[q_start:q_end, k_start:k_end] += 1
        for square in pieces.squares:
            own = np.tri(len(square)) if square.causal else holes.visible(square.start, square.end)
            times[square.start : square.end, square.start : square.end] += own.astype(np.int64)
            assert square.causal or len(square) <= limit
        np.testing.assert_array_equal(times, holes.visible(0, size))
        batches = batched(pieces.squares, most_tokens=200)
        assert sorted(square for batch in batches for square in batch) == sorted(pieces.squares)
        for batch in batches:
            assert len(batch) == 1 or len(batch) * max(map(len, batch)) <= 200
            assert len({square.causal for square in batch}) == 1


class Inputs(NamedTuple):
    """Random queries, keys, values and the gradient of what comes out."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gradient: torch.Tensor

    @classmethod
    def of(cls, size: int, dtype: torch.dtype, device: torch.device = CPU) -> "Inputs":
        """Four query heads share two key heads."""
        generator = torch.Generator().manual_seed(size)
        made = [torch.randn(1, heads, size, 16, generator=generator).to(device, dtype) for heads in (4, 2, 2)]
        gradient = torch.randn(1, size, 4, 16, generator=generator).to(device, dtype)
        return cls(*(each.requires_grad_() for each in made), gradient)

    def results(self, attend: Attend) -> list[torch.Tensor]:
        """The output, and the gradients of query, key and value."""
        output = attend(self.query, self.key, self.value, 0.3)
        return [output.detach(), *torch.autograd.grad(output, self[:3], self.gradient)]


@pytest.mark.parametrize("limit", SQUARES)
def test_lean_is_dense_forward_and_backward(limit: int) -> None:
    for packed in packs(4):
        size = len(packed.token_ids)
        inputs = Inputs.of(size, torch.float64)
        expected = inputs.results(DenseAttention.of(packed.forest, size, CPU))
        for found, wanted in zip(inputs.results(LeanAttention.of(packed.forest, limit)), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_lean_rounds_as_its_type_does(dtype: torch.dtype, tolerance: float) -> None:
    for packed in packs(5):
        size = len(packed.token_ids)
        inputs = Inputs.of(size, dtype)
        exact = Inputs(*(each.detach().double().requires_grad_() for each in inputs))
        expected = exact.results(DenseAttention.of(packed.forest, size, CPU))
        for found, wanted in zip(inputs.results(LeanAttention.of(packed.forest, 64)), expected, strict=True):
            assert found.dtype == dtype
            assert (found - wanted).norm() <= tolerance * wanted.norm()


def test_a_trajectory_of_thousands_of_tokens_is_dense_in_float32() -> None:
    row = tree(range(8, 24), [[300, 100, 500, 40], [10, 900]], tail=200, generator=np.random.default_rng(6))
    packed = pack([Family((row,))])
    inputs = Inputs.of(len(row), torch.float32)
    expected = inputs.results(DenseAttention.of(packed.forest, len(row), CPU))
    for found, wanted in zip(inputs.results(LeanAttention.of(packed.forest)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_what_lean_keeps_for_backward_grows_with_the_row_and_not_its_square() -> None:
    def kept_bytes(words: int) -> float:
        row = tree(range(8, 16), [[words] * 4], tail=words, generator=np.random.default_rng(7))
        sizes: list[int] = []
        inputs = Inputs.of(len(row), torch.float32)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            inputs.results(LeanAttention.of(pack([Family((row,))]).forest))
        return sum(sizes) / len(row)

    assert kept_bytes(600) == pytest.approx(kept_bytes(300), rel=0.02)


def test_a_bucket_holds_its_row_and_there_are_few() -> None:
    lengths = range(1, 65_537)
    assert all(bucket(length) % BLOCK == 0 and bucket(length) >= length for length in lengths)
    assert all(bucket(length) - length <= max(BLOCK, length / 4) for length in lengths)
    assert len({bucket(length) for length in lengths}) <= 8 * math.log2(lengths[-1] / BLOCK)


def flex_and_dense(packed: Packed, device: torch.device) -> tuple[FlexAttention, DenseAttention, int]:
    size = bucket(len(packed.token_ids))
    return FlexAttention.of(packed.forest, size, device), DenseAttention.of(packed.forest, size, device), size


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_is_dense_forward() -> None:
    for packed in packs(8, 10):
        flex, dense, size = flex_and_dense(packed, CPU)
        query, key, value, _ = map(torch.Tensor.detach, Inputs.of(size, torch.float32))
        torch.testing.assert_close(flex(query, key, value, 0.3), dense(query, key, value, 0.3), rtol=1e-4, atol=1e-5)


def test_the_block_mask_leaves_out_what_nobody_sees_and_masks_no_block_that_all_see() -> None:
    left_out = whole = 0
    for packed in packs(9, 10, longest_step=300):
        flex, dense, size = flex_and_dense(packed, CPU)
        blocks = dense.visible_SS.view(size // BLOCK, BLOCK, size // BLOCK, BLOCK).transpose(1, 2).flatten(2)
        masked = _blocks(flex.mask.kv_num_blocks, flex.mask.kv_indices)
        full = _blocks(flex.mask.full_kv_num_blocks, flex.mask.full_kv_indices)
        assert not (masked & full).any()
        assert blocks[full].all()
        assert not blocks[~(masked | full)].any()
        left_out += int((~(masked | full)).tril().sum())
        whole += int(full.sum())
    assert left_out > 0
    assert whole > 0


def _blocks(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """bool [Q, K] of the blocks that are listed."""
    width = indices.shape[-1]
    listed = torch.arange(width) < counts[0, 0][:, None]
    found = torch.zeros(width, width, dtype=torch.bool)
    return found.scatter(1, indices[0, 0].long(), listed)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles for the CPU")
def test_flex_compiled_for_the_cpu_is_dense_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: Callable[..., torch.Tensor] = torch.compile(torch.nn.attention.flex_attention.flex_attention)
    monkeypatch.setattr("npr_learner.attention.flex.flex_attention", compiled)
    flex, dense, size = flex_and_dense(packs(10, 1)[0], CPU)
    query, key, value, _ = map(torch.Tensor.detach, Inputs.of(size, torch.float32))
    torch.testing.assert_close(flex(query, key, value, 0.3), dense(query, key, value, 0.3), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_flex_is_dense_forward_and_backward_on_a_gpu() -> None:
    device = torch.device("cuda")
    for packed in packs(11, 20):
        flex, dense, size = flex_and_dense(packed, device)
        inputs = Inputs.of(size, torch.float32, device)
        for found, wanted in zip(inputs.results(flex), inputs.results(dense), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_a_model_that_is_told_no_forest_attends_causally_and_is_saved_as_any_other() -> None:
    model, ids = qwen3(len(WORDS)), torch.arange(12)[None]
    ours = model(input_ids=ids).logits
    assert "npr" not in model.config.to_json_string()
    model.set_attn_implementation("eager")
    torch.testing.assert_close(ours, model(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
