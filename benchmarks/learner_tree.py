"""Training on one long tree: attention by pieces against a dense mask.

- seconds: forward and backward of a whole model, and of attention alone, over one trajectory of eight branches. Rivals
  are SDPA under the dense mask, which computes the same, and causal attention, which is what a sequential model costs;
- memory: most that a process of its own comes to hold for mask and attention of one layer, and for the head's logits,
  of a far longer trajectory, each beside the dense way; and how much more it is when the trajectory is twice as long.

The gradients of lean and dense attention are compared first.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from _harness import Begin, parser, progress, tell
from _training import Shape, gradient_of, require_equal
from transformers import Qwen3ForCausalLM

from npr_common.topology import Topology
from npr_learner.attention.interface import AttentionKind
from npr_learner.attention.testing import tree
from npr_learner.batch import Batch, collate
from npr_learner.forward import TokenScorer
from npr_learner.log_probs import chosen_log_probs
from npr_learner.options import Precision
from npr_learner.packing import Family
from npr_learner.row import Row

CPU = torch.device("cpu")


SHAPES = (Shape("narrow", 512, 128, 2, head_size=64), Shape("wide", 512, 1024, 1, heads=16, head_size=64))


def make_tree(tokens: int) -> Row:
    """One block of eight branches: an eighth of the tokens each before and after, the rest in the branches."""
    outside, branch = tokens // 8, tokens * 3 // 4 // 8
    generator = np.random.default_rng(0)
    prompt = generator.integers(8, 32, outside).tolist()
    return tree(prompt, [[branch] * 8], tail=outside // 2, generator=generator)


def train(model: Qwen3ForCausalLM, batch: Batch) -> None:
    """One gradient."""
    model.zero_grad()
    log_probs, _ = TokenScorer(model, Precision.FLOAT32)(batch)
    torch.autograd.backward(log_probs.mean())


def batches(row: Row) -> dict[str, Batch]:
    """The trajectory for each contender; `causal` computes something else, for what it costs."""
    made = {kind.value: collate([Family((row,))], CPU, kind) for kind in (AttentionKind.LEAN, AttentionKind.DENSE)}
    sequential = Row(row.token_ids, Topology.causal(len(row)), row.trained, row.behavior_log_probs)
    return made | {"causal": collate([Family((sequential,))], CPU, AttentionKind.LEAN)}


def attention_alone(shape: Shape, batch: Batch, size: int) -> None:
    """Forward and backward of one layer's attention."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, size, shape.head_size, generator=generator, requires_grad=True)
        for heads in (shape.heads, shape.heads // 2, shape.heads // 2)
    )
    torch.autograd.backward(batch.attend(query, key, value, 0.125).sum())


def trained(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """The gradient, flat."""
    train(model, batch)
    return gradient_of(model)


def best_seconds(works: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """The best CPU seconds of each, in turns."""
    seconds = dict.fromkeys(works, float("inf"))
    for _ in range(repeats):
        for name, work in works.items():
            started = time.process_time()
            work()
            seconds[name] = min(seconds[name], time.process_time() - started)
    return seconds


MEMORY_VOCABULARY = 8192


def lean_attention(row: Row) -> None:
    """The attention of one layer by pieces."""
    attention_alone(SHAPES[0], collate([Family((row,))], CPU, AttentionKind.LEAN), len(row))


def dense_attention(row: Row) -> None:
    """The attention of one layer under a dense mask."""
    attention_alone(SHAPES[0], collate([Family((row,))], CPU, AttentionKind.DENSE), len(row))


def chunked_head(row: Row) -> None:
    """Log-probabilities of the trained tokens, chunk by chunk."""
    hidden, head, targets = _head_inputs(row)
    torch.autograd.backward(chosen_log_probs(hidden, head, targets)[0].sum())


def full_head(row: Row) -> None:
    """The same with all logits at once."""
    hidden, head, targets = _head_inputs(row)
    torch.autograd.backward((hidden @ head.T).log_softmax(-1).gather(-1, targets[:, None]).sum())


def _head_inputs(row: Row) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(len(row.trained), 64, requires_grad=True)
    return hidden, torch.randn(MEMORY_VOCABULARY, 64, requires_grad=True), torch.from_numpy(row.token_ids[row.trained])


HOLDERS: dict[str, Callable[[Row], None]] = {
    work.__name__: work for work in (lean_attention, dense_attention, chunked_head, full_head)
}


def peak_mib(name: str, tokens: int) -> float:
    """Most MiB that one of `HOLDERS` holds beyond what its process held before."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_peak_mib, name, tokens).result()


def _peak_mib(name: str, tokens: int) -> float:
    row = make_tree(tokens)
    HOLDERS[name](make_tree(128))  # what torch sets up once
    before = _resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    HOLDERS[name](row)
    return _resident_mib("VmHWM") - before


def _resident_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"this kernel does not tell {field}")


def measure_seconds(tokens: int, repeats: int, begin: Begin) -> dict[str, dict[str, float]]:
    """Best CPU seconds by shape and part, of each contender."""
    row = make_tree(tokens)
    made = batches(row)
    seconds = {}
    for shape in SHAPES:
        begin(f"{shape.name}: a tree of {len(row)} tokens")
        model = shape.model()
        require_equal("lean attention", trained(model, made["lean"]), trained(model, made["dense"]))
        seconds[f"{shape.name}_training"] = best_seconds(
            {name: partial(train, model, batch) for name, batch in made.items()}, repeats
        )
        seconds[f"{shape.name}_attention"] = best_seconds(
            {name: partial(attention_alone, shape, batch, len(row)) for name, batch in made.items()}, repeats
        )
    return seconds


def measure_memory(tokens: int, begin: Begin) -> dict[str, dict[str, float]]:
    """Peak MiB of each way, at half the tokens and at all."""
    found: dict[str, dict[str, float]] = {}
    for name in HOLDERS:
        begin(f"memory of {name}")
        found[name] = {str(size): peak_mib(name, size) for size in (tokens // 2, tokens)}
    return found


def main() -> None:
    """Measures and tells."""
    arguments = parser(__doc__).parse_args()
    tokens, long_tokens, repeats = (1024, 8192, 1) if arguments.quick else (4096, 32_768, 3)
    with progress(len(SHAPES) + len(HOLDERS)) as begin:
        seconds = measure_seconds(tokens, repeats, begin)
        memory = measure_memory(long_tokens, begin)
    at_length = {name: held[str(long_tokens)] for name, held in memory.items()}
    figures = {
        "benchmark": "learner_tree",
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        "cpu_seconds": seconds,
        "peak_mib": memory,
        "ratios": {
            **{f"{part}_dense_vs_lean": taken["dense"] / taken["lean"] for part, taken in seconds.items()},
            **{f"{part}_causal_vs_lean": taken["causal"] / taken["lean"] for part, taken in seconds.items()},
            "memory_dense_vs_lean_attention": at_length["dense_attention"] / at_length["lean_attention"],
            "memory_full_vs_chunked_head": at_length["full_head"] / at_length["chunked_head"],
            **{
                f"memory_growth_when_doubled_{name}": held[str(long_tokens)] / held[str(long_tokens // 2)]
                for name, held in memory.items()
            },
        },
    }
    tell(figures, as_json=arguments.json)


if __name__ == "__main__":
    main()
