"""Training of the seed model from scratch.

Invariants
- The result is a function of the settings (on one machine and thread count): data, initialisation and order all follow
  from `seed`.
- The loss is the negative log-likelihood of response tokens, divided by a constant. A mean per batch would give a token
  of a short style more weight, since batches are sorted by length.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from npr_common.tasks import MultipartTask, Split
from npr_learner.seed.corpus import Author, Mix

_IGNORED: Final = -100
# Batches are cut from pools of this many, sorted by length: less padding, and still well mixed.
_BATCHES_PER_POOL: Final = 16
_TYPICAL_RESPONSE_TOKENS: Final = 80


@dataclass(frozen=True)
class SeedSettings:
    """What decides a seed model. Learning rates are the peaks of a cosine after a linear warm-up."""

    steps: int = 3500
    batch_size: int = 16
    warmup_steps: int = 30
    muon_learning_rate: float = 0.03
    adam_learning_rate: float = 4e-3
    gradient_clip: float = 1.0
    seed: int = 0
    mix: Mix = field(default_factory=Mix)
    task: MultipartTask = field(default_factory=MultipartTask)


@dataclass(frozen=True)
class Progress:
    """A glance at training: mean loss per response token since the last one, and seconds so far."""

    step: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Example:
    """Token ids of one prompt and response; the first `prompt_length` carry no loss."""

    token_ids: list[int]
    prompt_length: int


def examples(tokenizer: PreTrainedTokenizerBase, settings: SeedSettings) -> Iterator[Example]:
    """Training problems in order, each with a response of its own; never ends."""
    author = Author(random.Random(settings.seed), settings.mix)
    index = 0
    while True:
        problem = settings.task.problem(index, Split.TRAIN)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt_text}], tokenize=False, add_generation_prompt=True
        )
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        response_ids = tokenizer.encode(author.response(problem), add_special_tokens=False)
        yield Example([*prompt_ids, *response_ids, tokenizer.eos_token_id], len(prompt_ids))
        index += 1


def batches(stream: Iterator[Example], settings: SeedSettings) -> Iterator[list[Example]]:
    """Batches of examples of like length, in a shuffled order; never ends."""
    rng = random.Random(settings.seed)
    size = settings.batch_size
    while True:
        pool = sorted(
            (next(stream) for _ in range(size * _BATCHES_PER_POOL)), key=lambda example: len(example.token_ids)
        )
        cut = [pool[start : start + size] for start in range(0, len(pool), size)]
        rng.shuffle(cut)
        yield from cut


def collate(batch: Sequence[Example], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [B, T] and next-token targets [B, T] (prompt and padding ignored), padded on the right.

    Causal attention never looks right, so padding there needs no mask.
    """
    width = max(len(example.token_ids) for example in batch) - 1
    inputs = torch.full((len(batch), width), pad_id)
    targets = torch.full((len(batch), width), _IGNORED)
    for row, example in enumerate(batch):
        ids = torch.tensor(example.token_ids)
        inputs[row, : len(ids) - 1] = ids[:-1]
        targets[row, example.prompt_length - 1 : len(ids) - 1] = ids[example.prompt_length :]
    return inputs, targets


def optimizers(model: Qwen3ForCausalLM, settings: SeedSettings) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=settings.muon_learning_rate, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=settings.adam_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_factor(step: int, settings: SeedSettings) -> float:
    """Share of the peak learning rate at `step`: linear warm-up, then a cosine to zero."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * done))


def token_loss(model: Qwen3ForCausalLM, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed negative log-likelihood of the targets that are not ignored."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits
    return functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum"
    )


def train(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, settings: SeedSettings, *, report_every: int = 200
) -> Iterator[Progress]:
    """Train `model` in place, yielding progress every `report_every` steps and after the last."""
    steppers = optimizers(model, settings)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate_factor(step, settings)) for o in steppers]
    stream = batches(examples(tokenizer, settings), settings)
    constant = settings.batch_size * _TYPICAL_RESPONSE_TOKENS
    started, loss_sum, tokens = time.monotonic(), 0.0, 0
    for step in range(1, settings.steps + 1):
        inputs, targets = collate(next(stream), int(tokenizer.pad_token_id))
        loss = token_loss(model, inputs, targets)
        torch.autograd.backward(loss / constant)
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip)
        for stepper, schedule in zip(steppers, schedules, strict=True):
            stepper.step()
            schedule.step()
            stepper.zero_grad()
        loss_sum, tokens = loss_sum + loss.item(), tokens + int((targets != _IGNORED).sum())
        if step % report_every == 0 or step == settings.steps:
            yield Progress(step, loss_sum / tokens, time.monotonic() - started)
            loss_sum, tokens = 0.0, 0
