"""One PAPO gradient over a batch of parallel trajectories: the learner against two naive loops, on the same batch.

The rivals compute the same gradient, and are checked for it: `one_row` runs one trajectory a pass; `padded` pads every
row to the batch's longest. Both take full logits of every position through autograd. The learner sorts rows by length,
sends only trained positions through a chunked head, and only measures rows whose advantage is 0.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
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
    papo_loss(log_probs, batch.advantages_N.float(), normalizer).loss.backward()


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


def timed(contender: Contender, model: Qwen3ForCausalLM, rows: Sequence[Row]) -> float:
    """CPU seconds for one gradient: what other processes take doesn't count."""
    model.zero_grad()
    started = time.process_time()
    contender(model, rows)
    return time.process_time() - started


def gradient_of(contender: Contender, model: Qwen3ForCausalLM, rows: Sequence[Row]) -> torch.Tensor:
    """The whole gradient, flat."""
    timed(contender, model, rows)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def measure(shape: Shape, count: int, repeats: int) -> dict[str, float]:
    """Best CPU seconds of each contender, in turns; raises if their gradients differ."""
    model, rows = make_model(shape), make_rows(count, shape.vocabulary)
    contenders: dict[str, Contender] = {"learner": learner, "one_row": one_row, "padded": padded}
    gradients = {name: gradient_of(contender, model, rows) for name, contender in contenders.items()}
    for name, gradient in gradients.items():
        difference = (gradient - gradients["learner"]).norm() / gradients["learner"].norm()
        if difference > 1e-4:
            raise AssertionError(f"{name} computes another gradient: {difference:.1e} apart")
    seconds = {name: float("inf") for name in contenders}
    for _ in range(repeats):
        for name, contender in contenders.items():
            seconds[name] = min(seconds[name], timed(contender, model, rows))
    return {**seconds, "tokens": float(sum(map(len, rows)))}


def main() -> None:
    """Prints the figures, the JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows, under a minute")
    parser.add_argument("--json", action="store_true", help="print the JSON object alone")
    arguments = parser.parse_args()
    count, repeats = (32, 2) if arguments.quick else (192, 5)
    figures: dict[str, object] = {"benchmark": "learner_step", "rows": count, "threads": torch.get_num_threads()}
    ratios: dict[str, float] = {}
    for shape in SHAPES:
        seconds = measure(shape, count, repeats)
        figures[f"{shape.name}_seconds"] = {name: round(value, 3) for name, value in seconds.items()}
        for rival in ("one_row", "padded"):
            ratios[f"{shape.name}_learner_vs_{rival}"] = round(seconds[rival] / seconds["learner"], 2)
    figures["ratios"] = ratios
    if not arguments.json:
        for name, value in figures.items():
            print(f"{name:32} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
