"""Both engine backends on the same forced trees: parallel against autoregressive, and what fork, seal and join cost.

- `torch`: the engine of the rollout process.
- `sglang`: a server with the plug-in, reached as the service reaches it, where `--sglang-python` names the Python of an
  environment that has it (`scripts/setup-sglang.sh`).
- vLLM decodes as many tokens autoregressively, of its own choice, where `--vllm-python` names its Python.

The trees are forced (`record/script.py`): every rival decodes the same tokens, each tree with its forks, and as one
causal sequence. Batches of trees are submitted at once; seconds are medians over rounds, of throughput from the first
request to the last answer, and of the time to answer over the trees. Rivals take turns within a round.

Fork, seal and join are measured by one tree of many short blocks at a time, each token told as it comes, so that the
client sees each step: what passes from `</guideline>` to the first tokens of the branches, less a plain step of the
block, is the fork; what passes from the branches' last tokens to the first one behind them, less a plain step of the
trunk, is seal and join. The feeding of the forced tokens (headers and cue) is in them. So they are also told

- beyond the plain steps in which a decoder that is not parallel would say the same forced tokens, and
- beyond the bare feeding: plain requests for as many tokens behind a prefix of the same length, in the server's
  cache.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
from pathlib import Path
from typing import Any

import torch
from _backends import Backend, BlockCosts, Decoding, Feeding, TorchBackend, block_costs, decode, sglang_backend
from _harness import Begin, aside, median_interval, parser, progress, table, tell
from _peers import VllmError, VllmPeer
from _subjects import QWEN3_SHAPE, Subject, subject
from _trees import cues, equal_tree
from rich.table import Table

from npr_rollout.record.outcomes import Visibility
from npr_rollout.testing.trees import Tree

Figures = dict[str, Any]
_MODES = (Visibility.PARALLEL, Visibility.SEQUENTIAL)
_SHORT_BRANCH = 8  # sampled tokens of a branch, where fork and join are measured
_BLOCKS = 4  # of a tree there


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with subject(arguments.model) as chosen, contextlib.ExitStack() as stack:
        backends = 1 + bool(arguments.sglang_python)
        pieces = backends * (1 + len(arguments.batches) * arguments.rounds + 1) + bool(arguments.vllm_python)
        begin = stack.enter_context(progress(pieces))
        bench = _Bench(chosen, arguments, begin)
        figures: Figures = {
            "benchmark": "engine_backends",
            "model": arguments.model,
            "threads": torch.get_num_threads(),
            "branches": arguments.branches,
            "branch_tokens": arguments.branch_tokens,
            "backends": bench.backends(stack),
        }
        figures["vllm"] = bench.vllm(arguments.vllm_python) if arguments.vllm_python else None
    figures["ratios"] = _ratios(figures)
    tell(figures, as_json=arguments.json, tables=[_batch_table(figures), _cost_table(figures)])


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--model", default="tiny", help=f"tiny, smollm2, {QWEN3_SHAPE}, or a folder")
    options.add_argument("--batches", type=int, nargs="+", help="trees decoded at once")
    options.add_argument("--branches", type=int, default=8, help="branches of a block")
    options.add_argument("--branch-tokens", type=int, help="tokens that a branch samples")
    options.add_argument("--prompt-tokens", type=int, default=48)
    options.add_argument("--rounds", type=int, help="turns of each rival; medians count")
    options.add_argument("--blocks", type=int, help="blocks in which fork, seal and join are measured")
    options.add_argument("--dtype", default="float32", help="of the weights")
    options.add_argument("--sglang-python", type=Path, help="the Python of an environment with SGLang and the plug-in")
    options.add_argument("--vllm-python", type=Path, help="the Python of an environment with vLLM")
    options.add_argument("--threads", type=int, help="CPU threads of each rival; torch's default unless given")
    arguments = options.parse_args()
    large, quick = arguments.model == QWEN3_SHAPE, arguments.quick
    defaults = {
        "batches": [1] if large and quick else [1, 8] if quick else [1, 8, 32],
        "branch_tokens": 16 if quick else 48,
        "rounds": 1 if quick or large else 3,
        "blocks": 4 if quick else 12 if large else 48,
    }
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


class _Bench:
    def __init__(self, chosen: Subject, arguments: argparse.Namespace, begin: Begin) -> None:
        self._subject = chosen
        self._arguments = arguments
        self._begin = begin
        self._drawn = random.Random(0)
        longest = len(self._tree(arguments.branch_tokens).token_ids) + arguments.branches + 8
        self._pool_tokens = max(arguments.batches) * longest + 1024

    def backends(self, stack: contextlib.ExitStack) -> Figures:
        """What each backend does; the server's while it runs alone with this process."""
        self._begin("torch: loading")
        torch_backend = TorchBackend(self._subject, self._arguments.dtype, self._pool_tokens)
        measured = {torch_backend.name: self._measure(torch_backend)}
        if self._arguments.sglang_python:
            self._begin("sglang: starting the server")
            threads = torch.get_num_threads()
            with sglang_backend(
                self._arguments.sglang_python, self._subject, self._arguments.dtype, self._pool_tokens, threads
            ) as served:
                measured[served.name] = self._measure(served)
        return measured

    def _measure(self, backend: Backend) -> Figures:
        for mode in _MODES:  # what is compiled or packed at first use
            decode(backend, self._subject, [self._tree(4)], mode)
        return {
            "batches": {str(count): self._batch(backend, count) for count in self._arguments.batches},
            "costs": self._costs(backend),
        }

    def _batch(self, backend: Backend, count: int) -> Figures:
        done: dict[Visibility, list[Decoding]] = {mode: [] for mode in _MODES}
        for index in range(self._arguments.rounds):
            self._begin(f"{backend.name}: {count} trees, round {index + 1} of {self._arguments.rounds}")
            trees = [self._tree(self._arguments.branch_tokens) for _ in range(count)]
            for mode in _MODES if index % 2 else reversed(_MODES):
                done[mode].append(decode(backend, self._subject, trees, mode))
        figures = {
            name: {
                "tokens_per_second": statistics.median(each.tokens_per_second for each in done[mode]),
                "seconds_to_answer": statistics.median(each.time_to_answer for each in done[mode]),
            }
            for mode, name in zip(_MODES, ("parallel", "autoregressive"), strict=True)
        }
        aside(f"{backend.name}, trees at once: {count}", figures)
        return figures

    def _costs(self, backend: Backend) -> Figures:
        self._begin(f"{backend.name}: fork, seal and join in {self._arguments.blocks} blocks")
        branches = self._arguments.branches
        found: list[BlockCosts] = []
        fed: list[Feeding] = []
        for _ in range(-(-self._arguments.blocks // _BLOCKS)):
            found.append(block_costs(backend, self._subject, self._tree(_SHORT_BRANCH, _BLOCKS), _BLOCKS, branches))
            fed += backend.feeding(self._tree(_SHORT_BRANCH, _BLOCKS), _BLOCKS, branches)
        headers, cue = cues(self._subject, branches)
        figures = _summary(found, fed, max(map(len, headers)), len(cue))
        aside(f"{backend.name}, fork, seal and join", figures)
        return figures

    def vllm(self, python: Path) -> Figures | str:
        """Autoregressive decoding of as many tokens, by batch; or why not."""
        self._begin("vllm")
        tree = self._tree(self._arguments.branch_tokens)
        new = len(tree.token_ids) - tree.prompt_length
        try:
            dtype = getattr(torch, self._arguments.dtype)
            batch = max(self._arguments.batches)
            peer = VllmPeer(python, self._subject, dtype, batch, len(tree.token_ids) + 1)
        except VllmError as error:
            return str(error)
        measured = {}
        try:
            for count in self._arguments.batches:
                rounds = [
                    peer.generate([list(self._tree(4).prompt) for _ in range(count)], new)[0]
                    for _ in range(self._arguments.rounds + 1)
                ][1:]
                seconds = statistics.median(rounds)
                measured[str(count)] = {"tokens_per_second": count * new / seconds, "seconds_to_answer": seconds}
                aside(f"{peer.name}, sequences at once: {count}", measured[str(count)])
        finally:
            peer.close()
        return {"name": peer.name, "batches": measured}

    def _tree(self, branch_tokens: int, blocks: int = 1) -> Tree:
        """A tree that was not there before."""
        return equal_tree(
            self._subject,
            self._drawn,
            branches=self._arguments.branches,
            branch_tokens=branch_tokens,
            prompt_tokens=self._arguments.prompt_tokens,
            blocks=blocks,
        )


def _summary(found: list[BlockCosts], fed: list[Feeding], header: int, cue: int) -> Figures:
    """Args: `header` and `cue`, the forced tokens of a branch and of a takeaway."""
    step = statistics.median([gap for costs in found for gap in costs.steps])
    trunk = statistics.median([gap for costs in found for gap in costs.trunk_steps])
    parts = {
        "fork": [value for costs in found for value in costs.forks],
        "seal": [value for costs in found for value in costs.seals],
        "join": [a - b for costs in found for a, b in zip(costs.joins, costs.seals, strict=True)],
        "together": [sum(values) for costs in found for values in zip(costs.forks, costs.joins, strict=True)],
    }
    together = statistics.median(parts["together"])
    bare = statistics.median(each.fork + each.join for each in fed) - step - trunk if fed else None
    return {
        "block_step_seconds": step,
        "trunk_step_seconds": trunk,
        **{f"{name}_steps": statistics.median(values) / step for name, values in parts.items()},
        "together_interval_steps": [end / step for end in median_interval(parts["together"])],
        "beyond_plain_steps": (together - header * step - cue * trunk) / step,
        "beyond_feeding_steps": None if bare is None else (together - bare) / step,
    }


def _ratios(figures: Figures) -> dict[str, float]:
    """More than 1 is better, but for what is counted in decode steps."""
    ratios: dict[str, float] = {}
    peer = figures["vllm"]["batches"] if isinstance(figures["vllm"], dict) else {}
    for name, measured in figures["backends"].items():
        for count, batch in measured["batches"].items():
            parallel, plain = batch["parallel"], batch["autoregressive"]
            ratios[f"{name}, {count} trees, tokens/s vs autoregressive"] = (
                parallel["tokens_per_second"] / plain["tokens_per_second"]
            )
            ratios[f"{name}, {count} trees, time to answer vs autoregressive"] = (
                plain["seconds_to_answer"] / parallel["seconds_to_answer"]
            )
            if count in peer:
                ratios[f"{name}, {count} trees, tokens/s vs vLLM autoregressive"] = (
                    parallel["tokens_per_second"] / peer[count]["tokens_per_second"]
                )
        costs = measured["costs"]
        ratios[f"{name}, fork + seal + join, in steps of the block"] = costs["together_steps"]
        ratios[f"{name}, the same beyond its forced tokens in plain steps"] = costs["beyond_plain_steps"]
        if costs["beyond_feeding_steps"] is not None:
            ratios[f"{name}, the same beyond the bare feeding of its forced tokens"] = costs["beyond_feeding_steps"]
    return ratios


def _batch_table(figures: Figures) -> Table:
    rows: list[list[object]] = []
    for name, measured in figures["backends"].items():
        for count, batch in measured["batches"].items():
            parallel, plain = batch["parallel"], batch["autoregressive"]
            rows.append(
                [
                    f"{name}, {count}",
                    parallel["tokens_per_second"],
                    plain["tokens_per_second"],
                    figures["ratios"][f"{name}, {count} trees, tokens/s vs autoregressive"],
                    parallel["seconds_to_answer"],
                    plain["seconds_to_answer"],
                    figures["ratios"][f"{name}, {count} trees, time to answer vs autoregressive"],
                ]
            )
    note = ""
    if isinstance(figures["vllm"], dict):
        for count, batch in figures["vllm"]["batches"].items():
            speed, seconds = batch["tokens_per_second"], batch["seconds_to_answer"]
            rows.append([f"{figures['vllm']['name']}, {count}", None, speed, None, None, seconds, None])
    elif figures["vllm"]:
        note = f"vLLM: {figures['vllm']}"
    title = f"{figures['model']}, trees of {figures['branches']} branches of {figures['branch_tokens']} tokens"
    columns = [
        "trees at once",
        "tokens/s parallel",
        "autoregressive",
        "ratio",
        "s to answer",
        "autoregressive",
        "ratio",
    ]
    return table(f"{title}, threads: {figures['threads']}", columns, rows, note)


def _cost_table(figures: Figures) -> Table:
    rows = [
        [
            name,
            1e3 * costs["trunk_step_seconds"],
            1e3 * costs["block_step_seconds"],
            costs["fork_steps"],
            costs["seal_steps"],
            costs["join_steps"],
            costs["together_steps"],
            " to ".join(f"{end:.3g}" for end in costs["together_interval_steps"]),
            costs["beyond_plain_steps"],
            costs["beyond_feeding_steps"],
        ]
        for name, costs in ((name, measured["costs"]) for name, measured in figures["backends"].items())
    ]
    beyond = ["beyond plain steps", "beyond bare feeding"]
    columns = ["", "trunk step, ms", "block step, ms", "fork", "seal", "join", "together", "95%", *beyond]
    return table("Fork, seal and join, in steps of the block (goal: at most 2 together)", columns, rows)


if __name__ == "__main__":
    main()
