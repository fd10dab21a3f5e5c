"""Parallel against autoregressive decoding of the same token trees by the same engine, and `transformers` generate.

Every rival decodes the same number of tokens of the same responses with the same model:

- `parallel`: fork and join, as the trees say; forced tokens are fed in one pass.
- `autoregressive`: the same responses as one causal sequence each, in the same batch, by the same engine.
- `generate`: `transformers`' own batched generation with its KV cache, as many new tokens as the longest response.

The first is to need fewer engine steps than the second by about the critical-path ratio: total tokens over tokens on
the critical path. Wall-clock time is printed beside it, for one trajectory at a time (time to answer) and for a batch.

The trees are what the model itself answers to held-out problems (those of its trajectories that forked and completed),
or random ones. The model is the tiny one that the learner ships, or one that is named.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _harness import parser, tell
from transformers import AutoModelForCausalLM

from npr.types.v1 import prompt_pb2
from npr_common.dialects import load_dialect
from npr_common.prompts import encode_prompt
from npr_common.references import resolve_reference
from npr_common.tags import TagIds
from npr_common.tasks import MultipartTask, Split
from npr_common.tokenizers import load_tokenizer
from npr_common.topology import topology
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.outcomes import Outcome, Visibility
from npr_rollout.engine.request import FinishedEvent, Limits, Request
from npr_rollout.engine.script import Script, ScriptedSampler
from npr_rollout.testing.trees import Tree, TreeMaker

DIALECT = load_dialect("npr")
TINY_NPR = "package:npr_learner/seed/tiny-npr"


@dataclass(frozen=True)
class Subject:
    """What is measured: a model, its tokenizer with tags, and where the weights are from."""

    model: Any
    tokenizer: Any
    weights: str

    @property
    def tags(self) -> TagIds:
        """The tags' token ids."""
        tags = TagIds.from_tokenizer(self.tokenizer, DIALECT)
        assert tags is not None
        return tags


@dataclass(frozen=True)
class Timing:
    """One way to decode: engine steps and median seconds, one trajectory at a time or all at once."""

    steps: int
    batch_seconds: float
    answer_seconds: float


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    subject = _subject(arguments.model)
    trees = _trees(subject, arguments) if arguments.random_trees else _own_trees(subject, arguments.trees)
    parallel, autoregressive = _measure(subject, trees, arguments.repeats)
    generate_seconds = _generate(subject, trees, arguments.repeats)
    tell(_report(subject, trees, parallel, autoregressive, generate_seconds), as_json=arguments.json)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--model", default=TINY_NPR, help="folder of a model after stage 2")
    options.add_argument("--random-trees", action="store_true", help="random trees in place of the model's own")
    options.add_argument("--trees", type=int, help="trajectories in the batch")
    options.add_argument("--branches", type=int, default=4, help="branches of a block")
    options.add_argument("--repeats", type=int, help="runs of each rival; the median counts")
    options.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    arguments = options.parse_args()
    arguments.trees = arguments.trees or (16 if arguments.quick else 48)
    arguments.repeats = arguments.repeats or (3 if arguments.quick else 7)
    return arguments


def _subject(reference: str) -> Subject:
    folder = Path(resolve_reference(reference))
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    return Subject(model.eval(), tokenizer, folder.name)


def _trees(subject: Subject, arguments: argparse.Namespace) -> list[Tree]:
    maker = TreeMaker(subject.tokenizer, 0)
    return [maker.tree(blocks=1, branches=arguments.branches, longest=24) for _ in range(arguments.trees)]


def _own_trees(subject: Subject, count: int) -> list[Tree]:
    """What the model answers to held-out problems, where it forked and completed."""
    engine = Engine(subject.model, subject.tokenizer, DIALECT, EngineConfig(pages=4096))
    for problem in MultipartTask().problems(2 * count, Split.TEST):
        message = prompt_pb2.ChatMessage(role="user", content=problem.prompt_text)
        ids = encode_prompt(subject.tokenizer, prompt_pb2.Prompt(messages=[message]))
        engine.submit(Request(problem.problem_id, tuple(ids), limits=Limits(max_tokens=400)))
    results = []
    while not engine.idle:
        results += [event.result for event in engine.step() if isinstance(event, FinishedEvent)]
    kept = [r for r in results if r.outcome is Outcome.COMPLETED and r.ledger.blocks and not r.branch_truncated]
    if len(kept) < count:
        raise SystemExit(f"Only {len(kept)} of {2 * count} responses forked and completed; give a model after stage 2.")
    return [Tree(result.token_ids, result.prompt_length) for result in kept[:count]]


def _measure(subject: Subject, trees: Sequence[Tree], repeats: int) -> list[Timing]:
    """Parallel and autoregressive decoding in turns, so that a busy machine slows both alike."""
    modes = (Visibility.PARALLEL, Visibility.SEQUENTIAL)
    batches = [[_decode(subject, trees, mode)[1] for mode in modes] for _ in range(repeats)]
    answers = [[_decode(subject, [tree], mode) for mode in modes] for tree in trees]
    return [
        Timing(
            steps=sum(answer[index][0] for answer in answers),
            batch_seconds=statistics.median(batch[index] for batch in batches),
            answer_seconds=statistics.median(answer[index][1] for answer in answers),
        )
        for index in range(len(modes))
    ]


def _decode(subject: Subject, trees: Sequence[Tree], visibility: Visibility) -> tuple[int, float]:
    """Engine steps and seconds to decode the trees together."""
    tags = subject.tags if visibility is Visibility.PARALLEL else None
    scripts = {str(i): Script.of(tree.token_ids, tree.prompt_length, tags) for i, tree in enumerate(trees)}
    engine = Engine(
        subject.model,
        subject.tokenizer,
        DIALECT,
        EngineConfig(pages=2048, max_running=len(trees)),
        sampler=ScriptedSampler(scripts),
    )
    for name, tree in zip(scripts, trees, strict=True):
        engine.submit(Request(name, tree.prompt, visibility=visibility))
    begin = time.perf_counter()
    while not engine.idle:
        engine.step()
    return engine.status().steps, time.perf_counter() - begin


def _generate(subject: Subject, trees: Sequence[Tree], repeats: int) -> float:
    """Seconds of `transformers` generate for as many new tokens, left-padded."""
    longest = max(len(tree.prompt) for tree in trees)
    pad = subject.tokenizer.pad_token_id
    rows = [[pad] * (longest - len(tree.prompt)) + list(tree.prompt) for tree in trees]
    mask = [[0] * (longest - len(tree.prompt)) + [1] * len(tree.prompt) for tree in trees]
    new = max(len(tree.token_ids) - tree.prompt_length for tree in trees)
    subject.model.set_attn_implementation("sdpa")
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        subject.model.generate(
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            min_new_tokens=new,
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=pad,
        )
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _report(
    subject: Subject, trees: Sequence[Tree], parallel: Timing, autoregressive: Timing, generate_seconds: float
) -> dict[str, Any]:
    shapes = [topology(tree.token_ids, tree.prompt_length, subject.tags) for tree in trees]
    total = sum(len(shape) - shape.prompt_length for shape in shapes)
    critical = sum(shape.critical_path_length for shape in shapes)
    return {
        "benchmark": "engine_parallel",
        "weights": subject.weights,
        "trajectories": len(trees),
        "total_tokens": total,
        "critical_path_tokens": critical,
        "parallel": vars(parallel) | {"tokens_per_second": total / parallel.batch_seconds},
        "autoregressive": vars(autoregressive) | {"tokens_per_second": total / autoregressive.batch_seconds},
        "generate": {"batch_seconds": generate_seconds, "tokens_per_second": total / generate_seconds},
        "ratios": {
            "critical_path_tokens": total / critical,
            "engine_steps_vs_autoregressive": autoregressive.steps / parallel.steps,
            "time_to_answer_vs_autoregressive": autoregressive.answer_seconds / parallel.answer_seconds,
            "batch_time_vs_autoregressive": autoregressive.batch_seconds / parallel.batch_seconds,
            "batch_time_vs_transformers_generate": generate_seconds / parallel.batch_seconds,
        },
    }


if __name__ == "__main__":
    main()
