"""The CPU's kernels compute what `transformers` computes, and give a token the same bits in every batch."""

from __future__ import annotations

import copy
import types
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from npr_common.dialects import load_dialect
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.cpu.compiled import Kernel, exp
from npr_rollout.engine.cpu.decoder import FusedDecoder, can_fuse
from npr_rollout.engine.cpu.packed_linear import PackedLinear, pack_weights
from npr_rollout.engine.cpu.row_counts import RowCounts
from npr_rollout.engine.engine import Engine
from npr_rollout.record.outcomes import Visibility
from npr_rollout.record.request import FinishedEvent, Limits, Request, Result, SamplingParams
from npr_rollout.testing.models import tagged_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": len(tagged_tokenizer()),
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
    "qwen3-biased": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, attention_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)),
}


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    model = MODELS[kind]().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.uniform_(parameter, -1, 2)  # what is one or zero at first would hide an error
    return model.to(dtype)


class DenseAttention:
    """Plain causal attention over the tokens of the pass, in the place of the cascade."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def arrays(self, layer: int, query: Any, key: Any, value: Any, scale: Any, out: Any) -> None:  # noqa: PLR0917
        by_head = (torch.from_numpy(a[: self._tokens]).transpose(0, 1) for a in (query, key, value))
        made = functional.scaled_dot_product_attention(*by_head, is_causal=True, scale=float(scale), enable_gqa=True)
        out[: self._tokens] = made.transpose(0, 1).numpy()


def ids_of(count: int) -> Tensor:
    return torch.randint(3, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def fused_logits(model: Any, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    positions = torch.arange(len(ids)) if positions is None else positions
    return FusedDecoder(model).logits(ids, positions, torch.arange(len(ids)), DenseAttention(len(ids)))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fused_decoder_computes_what_transformers_does(kind: str, dtype: torch.dtype) -> None:
    model = model_of(kind, dtype)
    reference = copy.deepcopy(model).float()  # weights in half precision are exact; arithmetic is float32
    assert can_fuse(model)
    with torch.inference_mode():
        expected = reference(input_ids=ids_of(81)[None]).logits[0]
    assert float((fused_logits(model, ids_of(81)) - expected).abs().max()) < 2e-4 * float(expected.abs().max())


def test_positions_may_repeat_as_those_of_branches_do() -> None:
    model = model_of("qwen3")
    positions = torch.tensor([0, 1, 2, 3, 2, 3, 4, 300])
    with torch.inference_mode():
        expected = copy.deepcopy(model)(input_ids=ids_of(8)[None], position_ids=positions[None]).logits[0]
    assert torch.allclose(fused_logits(model, ids_of(8), positions), expected, atol=2e-4)


def test_a_layer_that_half_precision_cannot_hold_is_computed_beside_the_others() -> None:
    model = model_of("qwen3", torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = 1e6
    with torch.inference_mode():
        expected = copy.deepcopy(model).float()(input_ids=ids_of(1)[None]).logits[0]
    assert float((fused_logits(model, ids_of(1)) - expected).abs().max()) < 2e-4 * float(expected.abs().max())
    assert model.model.layers[1].mlp.down_proj.row_counts is not model.model.layers[0].mlp.down_proj.row_counts


def test_fusing_twice_changes_nothing() -> None:
    model = model_of("llama")
    assert torch.equal(fused_logits(model, ids_of(9)), fused_logits(model, ids_of(9)))


@pytest.mark.parametrize(
    "change", [{"model_type": "gemma"}, {"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": "dynamic"}}]
)
def test_other_models_are_left_to_transformers(change: dict[str, Any]) -> None:
    model = model_of("qwen3")
    model.config = types.SimpleNamespace(**{**model.config.to_dict(), **change})
    assert not can_fuse(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 64), (58, 128), (384, 128), (1, 7), (777, 576), (1536, 576), (2048, 1024)])
def test_a_packed_layer_gives_a_row_the_same_bits_in_every_batch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0]).to(dtype).requires_grad_(requires_grad=False)
    packed = PackedLinear(linear)
    rows = torch.randn(400, shape[1])
    whole = packed(rows)
    exact = functional.linear(rows.double(), linear.weight.double(), linear.bias.double())
    assert float((whole - exact).abs().max()) < 1e-4
    for count in [*range(1, 70), 119, 120, 121, 255, 256, 257, 399]:
        assert torch.equal(packed(rows[:count]), whole[:count]), count
        assert torch.equal(packed(rows[-count:]), whole[-count:]), count


def test_rows_are_padded_to_a_number_that_agrees() -> None:
    def odd_ones_differ(rows: Tensor) -> Tensor:
        return rows * (1 + len(rows) % 2)

    counts = RowCounts(odd_ones_differ, 5, limit=8)
    assert [counts.padded(count) for count in range(1, 10)] == [2, 2, 4, 4, 6, 6, 8, 8, 9]
    for count in range(1, 30):
        rows = torch.randn(count, 5)
        assert torch.equal(counts.multiply(odd_ones_differ, rows), rows)


def test_a_weight_that_half_precision_cannot_hold_stays_float32() -> None:
    linear = nn.Linear(8, 8).to(torch.bfloat16)
    with torch.no_grad():
        linear.weight[0, 0] = 1e9
    row = torch.ones(1, 8)
    assert torch.allclose(PackedLinear(linear)(row), functional.linear(row, linear.weight.float(), linear.bias.float()))


def test_a_model_on_another_device_is_left_alone() -> None:
    with torch.device("meta"):
        model = MODELS["qwen3"]()
    assert pack_weights(model) == 0


def test_the_exponential_is_exact_to_single_precision() -> None:
    x = np.linspace(-87, 88, 200_001).astype(np.float32)

    def apply(values: Any, out: Any) -> None:
        for i in range(values.shape[0]):
            out[i] = exp(values[i])

    out = np.empty_like(x)
    numba.njit(apply)(x, out)
    exact = np.exp(x.astype(np.float64))
    assert float(np.max(np.abs(out - exact) / exact)) < 4e-7


def test_compiling_a_kernel_leaves_the_number_of_threads_alone() -> None:
    def double(values: Any) -> None:
        for i in numba.prange(values.shape[0]):
            values[i] *= 2

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        values = np.ones(4, np.float32)
        kernel = Kernel(double)
        for threads in (1, 2):
            kernel(values, threads=threads)
            assert torch.get_num_threads() == 1
        assert values.tolist() == [4.0] * 4
    finally:
        torch.set_num_threads(before)


def results_of(requests: list[Request], model: Any, **config: Any) -> tuple[dict[str, Result], Engine]:
    engine = Engine(
        copy.deepcopy(model), tagged_tokenizer(), load_dialect("npr"), EngineConfig(**{"page_size": 4, **config})
    )
    results: dict[str, Result] = {}
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, FinishedEvent):
                results[event.result.request_id] = event.result
    return results, engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_an_engine_gives_the_same_bits_alone_in_a_batch_in_chunks_and_after_preemptions(
    kind: str, dtype: torch.dtype
) -> None:
    model = model_of(kind, dtype)
    random = np.random.default_rng(5)
    prompts = [tuple(random.integers(3, SIZES["vocab_size"], random.integers(1, 40)).tolist()) for _ in range(6)]
    requests = [
        Request(
            f"{i}",
            prompts[i % len(prompts)],
            SamplingParams(seed=i, top_p=0.95),
            Limits(max_tokens=int(random.integers(5, 60))),
            visibility=Visibility.SEQUENTIAL,
        )
        for i in range(48)
    ]
    alone = {name: result for request in requests for name, result in results_of([request], model)[0].items()}
    together, crowd = results_of(requests, model, pages=30, prefill_tokens=5)
    assert crowd.status().preemptions > 0
    for name, result in together.items():
        assert (result.token_ids, result.log_probs) == (alone[name].token_ids, alone[name].log_probs), name
