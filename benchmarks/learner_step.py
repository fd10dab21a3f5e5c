"""One PAPO gradient over a batch of the tiny recipe's trajectories: the learner against plain loops, on the same batch.

All compute the same gradient, and are checked for it.

- `learner`: rows packed without padding, each group's prompt computed once (what the service runs);
- `packed`: the same, every row with its own prompt;
- `padded`: a trajectory a row, padded to the longest of its pass, under a dense mask, in the order they came;
- `one_row`: one trajectory a pass;
- `full_logits`: as `padded`, with the logits of every position through autograd.

All but `full_logits` send only trained positions through the chunked head.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from _harness import parser, tell
from _training import Shape, gradient_of, require_equal
from transformers import Qwen3ForCausalLM

from npr_common.dialects import load_dialect
from npr_common.tags import TagIds
from npr_common.tasks import MultipartTask, Split
from npr_common.tokenizers import add_tag_tokens
from npr_learner.advantages import papo_advantages
from npr_learner.batch import Batch
from npr_learner.canonical import ResponseEncoder
from npr_learner.forward import TokenScorer
from npr_learner.gradient import accumulate_gradient, trained_tokens
from npr_learner.log_probs import chosen_log_probs
from npr_learner.objectives import LossTerms, papo_loss
from npr_learner.options import StageOptions
from npr_learner.row import Row, make_row
from npr_learner.seed.corpus import Author, Mix
from npr_learner.seed.tokenizer import build_tokenizer
from npr_learner.world import World

BUDGET_TOKENS = 4096
GROUP = 12
"""Responses to a prompt, as in the tiny recipe."""


SHAPES = (Shape("tiny", 128, 128, 3), Shape("large_vocabulary", 32_768, 128, 2))


def make_rows(prompts: int) -> list[Row]:
    """`GROUP` well-formed responses to each prompt; a third of the groups are all right, so their advantage is 0."""
    dialect = load_dialect("npr")
    tokenizer = add_tag_tokens(build_tokenizer(), dialect)
    encoder = ResponseEncoder(tokenizer, dialect, parallel=True)
    author, generator = Author(random.Random(0), Mix(well_formed=1, defective=0, bare=0)), np.random.default_rng(0)
    names = [f"{index // GROUP}" for index in range(prompts * GROUP)]
    rewards = [1.0 if int(name) % 3 == 0 else float(generator.choice([-1, 1])) for name in names]
    rows = []
    for name, advantage in zip(names, papo_advantages(rewards, names, 1e-6), strict=True):
        problem = MultipartTask().problem(int(name), Split.TRAIN)
        prompt = [{"role": "user", "content": problem.prompt_text}]
        prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        response = encoder.encode(author.response(problem))
        if response is None:
            raise AssertionError("the author's responses are well-formed")
        tags = TagIds.from_tokenizer(tokenizer, dialect)
        rows.append(make_row([*prompt_ids, *response.ids], response.forced, None, tags, float(advantage)))
    return rows


def learner(model: Qwen3ForCausalLM, rows: Sequence[Row], *, share_prompts: bool = True) -> None:
    """What the service runs."""
    options = StageOptions(learning_rate=1.0, micro_batch_tokens=BUDGET_TOKENS, share_prompts=share_prompts)
    normalizer = trained_tokens(rows)

    def loss_of(log_probs: torch.Tensor, batch: Batch) -> LossTerms:
        return papo_loss(log_probs, batch.advantages_N.to(log_probs.dtype), normalizer)

    scorer = TokenScorer(model, options.dtype)
    alone = World.alone(torch.device("cpu"))
    accumulate_gradient(scorer, rows, loss_of, options, observe=lambda *_: None, world=alone)


class Padded(NamedTuple):
    """Rows padded at the right to the longest, a trajectory a row, as `Batch` has them packed."""

    token_ids_BS: torch.Tensor
    positions_BS: torch.Tensor
    visible_B1SS: torch.Tensor
    sources_N: torch.Tensor
    targets_N: torch.Tensor
    advantages_N: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Padded:
        """Pads; padded tokens see what is before them."""
        width = max(map(len, rows))
        ids, positions = np.zeros((2, len(rows), width), np.int64)
        visible = np.tile(np.tri(width, dtype=np.bool_), (len(rows), 1, 1, 1))
        for index, row in enumerate(rows):
            ids[index, : len(row)], positions[index, : len(row)] = row.token_ids, row.topology.positions
            visible[index, 0, : len(row), : len(row)] = row.topology.dense_mask()
        sources = [row.topology.predecessors[row.trained] + index * width for index, row in enumerate(rows)]
        targets = [row.token_ids[row.trained] for row in rows]
        advantages = [np.full(len(row.trained), row.advantage, np.float32) for row in rows]
        flat = (torch.from_numpy(np.concatenate(each)) for each in (sources, targets, advantages))
        return cls(*map(torch.from_numpy, (ids, positions, visible)), *flat)

    def hidden(self, model: Qwen3ForCausalLM) -> torch.Tensor:
        """Final hidden states, flat [B * S, H]."""
        output = model.get_decoder()(
            input_ids=self.token_ids_BS,
            attention_mask=self.visible_B1SS,
            position_ids=self.positions_BS,
            use_cache=False,
        )
        states: torch.Tensor = output.last_hidden_state.flatten(0, 1)
        return states


def padded(model: Qwen3ForCausalLM, rows: Sequence[Row], *, size: int | None = None) -> None:
    """A trajectory a row, `size` rows a pass or as many as the budget holds; rows without gradient are measured."""
    for row_set, has_gradient in _by_gradient(rows):
        for part in _passes(row_set, size):
            batch = Padded.of(part)
            with torch.set_grad_enabled(has_gradient):
                hidden_NH = batch.hidden(model)[batch.sources_N]
                log_probs, _ = chosen_log_probs(hidden_NH, model.get_output_embeddings().weight, batch.targets_N)
            if has_gradient:
                torch.autograd.backward(papo_loss(log_probs, batch.advantages_N, trained_tokens(rows)).loss)


def full_logits(model: Qwen3ForCausalLM, rows: Sequence[Row]) -> None:
    """All rows with all their logits."""
    for part in _passes(rows, None):
        batch = Padded.of(part)
        logits = batch.hidden(model) @ model.get_output_embeddings().weight.T
        log_probs = logits.log_softmax(-1)[batch.sources_N].gather(-1, batch.targets_N[:, None]).squeeze(-1)
        torch.autograd.backward(papo_loss(log_probs, batch.advantages_N, trained_tokens(rows)).loss)


def _by_gradient(rows: Sequence[Row]) -> Iterator[tuple[list[Row], bool]]:
    yield [row for row in rows if row.advantage], True
    yield [row for row in rows if not row.advantage], False


def _passes(rows: Sequence[Row], size: int | None) -> Iterator[Sequence[Row]]:
    size = size or BUDGET_TOKENS // max(map(len, rows))
    return (rows[start : start + size] for start in range(0, len(rows), size))


Contender = Callable[[Qwen3ForCausalLM, Sequence[Row]], None]
CONTENDERS: dict[str, Contender] = {
    "learner": learner,
    "packed": partial(learner, share_prompts=False),
    "padded": padded,
    "one_row": partial(padded, size=1),
    "full_logits": full_logits,
}


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
    return Pass(seconds, gradient_of(model))


def measure(shape: Shape, rows: Sequence[Row], repeats: int) -> dict[str, float]:
    """Best CPU seconds of each contender, in turns; raises if their gradients differ."""
    model = shape.model()
    seconds = dict.fromkeys(CONTENDERS, float("inf"))
    for _ in range(repeats):
        passes = {name: run(contender, model, rows) for name, contender in CONTENDERS.items()}
        for name, one in passes.items():
            require_equal(name, one.gradient, passes["learner"].gradient)
            seconds[name] = min(seconds[name], one.seconds)
    return seconds


def main() -> None:
    """Measures and tells."""
    arguments = parser(__doc__).parse_args()
    prompts, repeats = (4, 2) if arguments.quick else (16, 3)
    rows = make_rows(prompts)
    seconds = {shape.name: measure(shape, rows, repeats) for shape in SHAPES}
    ratios = {
        f"{shape}_learner_vs_{rival}": taken[rival] / taken["learner"]
        for shape, taken in seconds.items()
        for rival in CONTENDERS
        if rival != "learner"
    }
    ratios |= {f"{shape}_packed_vs_padded": taken["padded"] / taken["packed"] for shape, taken in seconds.items()}
    tokens = sum(map(len, rows))
    figures = {
        "benchmark": "learner_step",
        "rows": len(rows),
        "tokens": tokens,
        "prompt_tokens": sum(row.topology.prompt_length for row in rows),
        "longest": max(map(len, rows)),
        "threads": torch.get_num_threads(),
        "cpu_seconds": seconds,
        "tokens_per_cpu_second": {shape: tokens / taken["learner"] for shape, taken in seconds.items()},
        "ratios": ratios,
    }
    tell(figures, as_json=arguments.json)


if __name__ == "__main__":
    main()
