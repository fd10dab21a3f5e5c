"""Autoregressive decoding by this engine against its peers: same weights, same prompts, same number of new tokens.

- this engine, with the weights in the type that its service would choose: as saved;
- `transformers` generate (a static batch) and its continuous batching, in float32 and bfloat16;
- vLLM, in both types, where `--vllm-python` names the Python of an environment that has it.

Greedy; an end of text ends nothing: this engine and generate never take it, the others may, and go on. Prompts are new
in every round and the same for all; rivals take turns within a round. Seconds are medians over rounds and include the
prefill. The best peer at a batch size is the fastest one in any type. `same tokens` is the share of a rival's tokens
that are those of `transformers` generate in float32: below one after two tokens were nearly as likely, after an end of
text, and in another type.

The second table says where this engine's time goes: its median decode step against the bare step (`_roofline.py`),
which bound that is at, and its own stopwatch.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from _decoding import Decoding, is_stalled
from _harness import Begin, parser, progress, speed, stall_note, table, tell
from _peers import PAGE_SIZE, ContinuousPeer, EnginePeer, GeneratePeer, Peer, Prompts, VllmError, VllmPeer
from _roofline import Roofline
from _subjects import QWEN3_SHAPE, Subject, subject
from rich.table import Table

from npr_rollout.engine.model_runner import kv_shape

Figures = dict[str, Any]


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with subject(arguments.model) as chosen, ExitStack() as stack:
        begin = stack.enter_context(progress(1 + len(arguments.batches) * (1 + arguments.rounds)))
        begin("loading the rivals")
        engine, peers = _rivals(chosen, arguments)
        for peer in peers:
            stack.callback(peer.close)
        roofline = Roofline(engine.model, chosen.linears, arguments.batches)
        batches = {
            str(batch): _measure(chosen, peers, roofline, batch, arguments, begin=begin) for batch in arguments.batches
        }
    figures = {
        "benchmark": "engine_autoregressive",
        "model": arguments.model,
        "threads": torch.get_num_threads(),
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "rounds": arguments.rounds,
        "batches": batches,
        "ratios": _ratios(batches),
    }
    tell(figures, as_json=arguments.json, tables=_tables(figures, engine.name))


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--model", default="tiny", help=f"tiny, smollm2, {QWEN3_SHAPE}, or a folder")
    options.add_argument("--batches", type=int, nargs="+", help="batch sizes")
    options.add_argument("--prompt-tokens", type=int, default=16)
    options.add_argument("--new-tokens", type=int, help="tokens decoded for each prompt")
    options.add_argument("--rounds", type=int, help="turns of each rival")
    options.add_argument(
        "--dtype", default="auto", help="of this engine's weights; auto, its service's choice: as saved"
    )
    options.add_argument("--vllm-python", type=Path, help="the Python of an environment with vLLM")
    options.add_argument("--threads", type=int, help="CPU threads of each rival; torch's default unless given")
    arguments = options.parse_args()
    large, quick = arguments.model == QWEN3_SHAPE, arguments.quick
    arguments.batches = arguments.batches or ([1, 8] if quick and large else [1, 8, 32])
    arguments.new_tokens = arguments.new_tokens or (8 if quick else 32) * (1 if large else 4)
    arguments.rounds = arguments.rounds or (1 if quick and large else 3 if quick or large else 7)
    return arguments


def _rivals(chosen: Subject, arguments: argparse.Namespace) -> tuple[EnginePeer, list[Peer]]:
    """This engine, and all rivals with it as the first."""
    batch, length = max(arguments.batches), arguments.prompt_tokens + arguments.new_tokens
    engine = EnginePeer(chosen, arguments.dtype, batch, length)
    peers: list[Peer] = [engine]
    pad = chosen.tokenizer.pad_token_id
    for each in (torch.float32, torch.bfloat16):
        model = chosen.load(each)
        peers += [GeneratePeer(model, pad), ContinuousPeer(model, pad, batch, length)]
        if arguments.vllm_python:
            try:
                peers.append(VllmPeer(arguments.vllm_python, chosen, each, batch, length))
            except VllmError as error:
                print(f"skipped: vllm, {each}: {error}")
    return engine, peers


def _measure(
    chosen: Subject,
    peers: Sequence[Peer],
    roofline: Roofline,
    batch: int,
    arguments: argparse.Namespace,
    *,
    begin: Begin,
) -> Figures:
    """Rounds at one batch size; this engine is the first of the rivals."""
    engine = peers[0]
    assert isinstance(engine, EnginePeer)
    begin(f"batch {batch}: first passes")
    for peer in peers:  # what is compiled or packed at first use
        peer.generate(_prompts(chosen, batch, -1, arguments.prompt_tokens), 2)
    engine.rounds.clear()
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    tokens: dict[str, list[int]] = {peer.name: [] for peer in peers}
    for index in range(arguments.rounds):
        begin(f"batch {batch}: round {index + 1} of {arguments.rounds}")
        prompts = _prompts(chosen, batch, index, arguments.prompt_tokens)
        for turn in range(len(peers)):
            peer = peers[(index + turn) % len(peers)]
            took, answers = peer.generate(prompts, arguments.new_tokens)
            seconds[peer.name].append(took)
            tokens[peer.name] += [token for answer in answers for token in answer]
        roofline.sample()
    oracle = next(peer.name for peer in peers if isinstance(peer, GeneratePeer))
    rivals = {
        name: {
            "tokens_per_second": batch * arguments.new_tokens / statistics.median(seconds[name]),
            "same_tokens": _same(tokens[name], tokens[oracle]),
            "stalled": name == engine.name and is_stalled(engine.rounds),  # the others tell no steps
        }
        for name in seconds
    }
    return {"rivals": rivals, "profile": _profile(engine, roofline, batch)}


def _same(tokens: Sequence[int], others: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(tokens, others, strict=True)) / len(tokens)


def _prompts(chosen: Subject, batch: int, index: int, length: int) -> Prompts:
    drawn = random.Random(1000 * batch + index)
    return [drawn.choices(chosen.words, k=length) for _ in range(batch)]


def _profile(engine: EnginePeer, roofline: Roofline, batch: int) -> Figures:
    """Where this engine's time goes."""
    steps = [step for done in engine.rounds for step in done.steps[1:]]  # the first one feeds the prompts
    step = statistics.median(step.seconds for step in steps)
    bytes_per_token = kv_shape(engine.model).bytes_per_token
    read = bytes_per_token * statistics.mean(step.kv_tokens_read for step in steps)
    bare, bound = roofline.seconds(batch, read), roofline.bound(batch)
    held = max(done.peak_pages for done in engine.rounds) * PAGE_SIZE * bytes_per_token
    return {
        "step_seconds": step,
        "bare_step_seconds": bare,
        "bare_share": bare / step,
        "bound": bound.at,
        "kernel": bound.kernel,
        "memory_bound_seconds": bound.memory + read / roofline.bandwidth,
        "compute_bound_seconds": bound.compute,
        "shares": Decoding(steps, []).shares(),
        "kv_bytes_held": held,
        "kv_bytes_read_per_step": read,
    }


def _ratios(batches: Figures) -> dict[str, float]:
    """How many times as fast this engine is as each rival, and as the best of them."""
    ratios = {}
    for batch, measured in batches.items():
        (_, own), *others = [(name, rival["tokens_per_second"]) for name, rival in measured["rivals"].items()]
        ratios[f"batch {batch}, vs the best peer"] = own / max(speed for _, speed in others)
        ratios |= {f"batch {batch}, vs {name}": own / speed for name, speed in others}
    return ratios


def _speed(rival: Figures) -> float | str:
    return speed(rival["tokens_per_second"], stalled=rival["stalled"])


def _tables(figures: Figures, engine: str) -> list[Table]:
    batches = figures["batches"]
    names = next(iter(batches.values()))["rivals"]
    rows = [
        [name, *(_speed(batches[b]["rivals"][name]) for b in batches)]
        + [figures["ratios"].get(f"batch {b}, vs {name}") for b in batches]
        + [min(batches[b]["rivals"][name]["same_tokens"] for b in batches)]
        for name in names
    ]
    rows.append(
        [
            "best peer",
            *(None for _ in batches),
            *(figures["ratios"][f"batch {b}, vs the best peer"] for b in batches),
            None,
        ]
    )
    load = f"{figures['model']}, {figures['new_tokens']} new tokens, threads: {figures['threads']}"
    speeds = table(
        f"Autoregressive decoding, batches of {', '.join(batches)}: {load}",
        ["", *(f"tokens/s at {b}" for b in batches), *(f"engine / it at {b}" for b in batches), "same tokens"],
        rows,
        stall_note(any(rival["stalled"] for measured in batches.values() for rival in measured["rivals"].values())),
    )
    profiles = [batches[b]["profile"] for b in batches]
    measures = {
        "decode step, ms": lambda p: 1e3 * p["step_seconds"],
        "bare step, ms": lambda p: 1e3 * p["bare_step_seconds"],
        "bare / decode step": lambda p: p["bare_share"],
        "bare step's kernel": lambda p: p["kernel"],
        "it is bound by": lambda p: p["bound"],
        "memory bound, ms": lambda p: 1e3 * p["memory_bound_seconds"],
        "compute bound, ms": lambda p: 1e3 * p["compute_bound_seconds"],
        "scheduling, share": lambda p: p["shares"]["scheduling"],
        "forward, share": lambda p: p["shares"]["forward"],
        "sampling, share": lambda p: p["shares"]["sampling"],
        "KV held, MB": lambda p: p["kv_bytes_held"] / 1e6,
        "KV read a step, MB": lambda p: p["kv_bytes_read_per_step"] / 1e6,
    }
    where = table(
        f"Where the time of {engine} goes",
        ["", *(f"batch {b}" for b in batches)],
        [[name, *map(of, profiles)] for name, of in measures.items()],
    )
    return [speeds, where]


if __name__ == "__main__":
    main()
