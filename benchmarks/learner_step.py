"""One PAPO gradient over a batch of parallel trajectories: the learner against two naive loops, on the same batch.

The rivals compute the same gradient, and are checked for it: `one_row` runs one trajectory a pass; `padded` pads every
row to the batch's longest. Both take full logits of every position through autograd. The learner sorts rows by length,
sends only trained positions through a chunked head, and only measures rows whose advantage is 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from _harness import parser, tell
from transformers import Qwen3Config, Qwen3ForCausalLM

from npr_common.topology import Topology
from npr_learner.advantages import papo_advantages
from npr_learner.batch import Batch, Row, collate, row_of_trajectory
from npr_learner.gradient import accumulate_gradient, trained_tokens
from npr_learner.objectives import LossTerms, papo_loss
from npr_learner.options import StageOptions
from npr_learner.testing import make_world

BUDGET_TOKENS = 4096
GROUP = 8


@dataclass(frozen=True)
class Shape:
    """A model to time."""

    name: str
    vocabulary: int
    hidden: int
    layers: int


SHAPES = (Shape("tiny", 64, 128, 4), Shape("large_vocabulary", 32_768, 128, 2))


def make_model(shape: Shape) -> Qwen3ForCausalLM:
    """A freshly initialised Qwen3."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    return Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")


def make_rows(count: int, vocabulary: int) -> list[Row]:
    """Trajectories of one to six branches; a third of their groups are all right, so their advantage is 0."""
    world, generator = make_world(), np.random.default_rng(0)
    names = [f"{index // GROUP}" for index in range(count)]
    rewards = [1.0 if index // GROUP % 3 == 0 else float(generator.choice([-1, 1])) for index in range(count)]
    advantages = papo_advantages(rewards, names, 1e-6)
    return [
        row_of_trajectory(
            world.parallel(generator, name, index, branches=int(generator.integers(1, 7))),
            world.tags,
            vocabulary,
            float(advantage),
        )
        for index, (name, advantage) in enumerate(zip(names, advantages, strict=True))
    ]


def learner(model: Qwen3ForCausalLM, rows: Sequence[Row]) -> None:
    """What the service runs."""
    normalizer = trained_tokens(rows)
    options = StageOptions(learning_rate=1.0, micro_batch_tokens=BUDGET_TOKENS)

    def loss_of(log_probs: torch.Tensor, batch: Batch) -> LossTerms:
        return papo_loss(log_probs, batch.advantages_N.to(log_probs.dtype), normalizer)

    accumulate_gradient(model, rows, loss_of, options, lambda *_: None)


def one_row(model: Qwen3ForCausalLM, rows: Sequence[Row]) -> None:
    """One trajectory a pass."""
    for row in rows:
        _naive(model, [row], len(row), trained_tokens(rows))


def padded(model: Qwen3ForCausalLM, rows: Sequence[Row]) -> None:
    """Every row padded to the longest, in the order they came."""
    width = max(map(len, rows))
    size = BUDGET_TOKENS // width
    for start in range(0, len(rows), size):
        _naive(model, rows[start : start + size], width, trained_tokens(rows))


def _naive(model: Qwen3ForCausalLM, rows: Sequence[Row], width: int, normalizer: int) -> None:
    batch = collate([*rows, _filler(rows[0], width)], torch.device("cpu"))
    count = len(rows)
    positions = batch.positions_BS
    visible = batch.visible_B1SS
    logits = model(
        input_ids=batch.token_ids_BS[:count],
        attention_mask=None if visible is None else visible[:count],
        position_ids=None if positions is None else positions[:count],
    ).logits
    log_probs_of_all = logits.log_softmax(-1).flatten(0, 1)[batch.sources_N]
    log_probs = log_probs_of_all.gather(-1, batch.targets_N[:, None]).squeeze(-1)
    torch.autograd.backward(papo_loss(log_probs, batch.advantages_N.float(), normalizer).loss)


def _filler(row: Row, width: int) -> Row:
    """A row of `width` tokens without trained ones; it makes `collate` pad the others to that width."""

    empty = np.zeros(0, np.int64)
    return replace(
        row,
        token_ids=np.zeros(width, np.int64),
        topology=Topology.causal(width),
        trained=empty,
        behavior_log_probs=np.zeros(0, np.float32),
    )


Contender = Callable[[Qwen3ForCausalLM, Sequence[Row]], None]


class Pass(NamedTuple):
    """One gradient, flat, and the CPU seconds that it took: what other processes take doesn't count."""

    seconds: float
    gradient: torch.Tensor


def run(contender: Contender, model: Qwen3ForCausalLM, rows: Sequence[Row]) -> Pass:
    """The gradient of the batch by this contender."""
    model.zero_grad()
    started = time.process_time()
    contender(model, rows)
    seconds = time.process_time() - started
    return Pass(seconds, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))


def measure(shape: Shape, rows: Sequence[Row], repeats: int) -> dict[str, float]:
    """Best CPU seconds of each contender, in turns; raises if their gradients differ."""
    model = make_model(shape)
    contenders: dict[str, Contender] = {"learner": learner, "one_row": one_row, "padded": padded}
    seconds = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats):
        passes = {name: run(contender, model, rows) for name, contender in contenders.items()}
        for name, one in passes.items():
            require_equal(name, one.gradient, passes["learner"].gradient)
            seconds[name] = min(seconds[name], one.seconds)
    return seconds


def require_equal(name: str, gradient: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises AssertionError unless two gradients differ by rounding only."""
    difference = (gradient - expected).norm() / expected.norm()
    if difference > 1e-4:
        raise AssertionError(f"{name} computes another gradient: {difference:.1e} apart")


def main() -> None:
    """Measures and tells."""
    arguments = parser(__doc__).parse_args()
    count, repeats = (24, 2) if arguments.quick else (192, 6)
    rows = {shape: make_rows(count, shape.vocabulary) for shape in SHAPES}
    seconds = {shape.name: measure(shape, rows[shape], repeats) for shape in SHAPES}
    ratios = {
        f"{shape}_learner_vs_{rival}": taken[rival] / taken["learner"]
        for shape, taken in seconds.items()
        for rival in ("one_row", "padded")
    }
    figures = {
        "benchmark": "learner_step",
        "rows": count,
        "tokens": sum(map(len, rows[SHAPES[0]])),
        "threads": torch.get_num_threads(),
        "cpu_seconds": seconds,
        "ratios": ratios,
    }
    tell(figures, as_json=arguments.json)


if __name__ == "__main__":
    main()
