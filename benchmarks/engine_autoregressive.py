"""Autoregressive decoding by this engine against its peers: same weights, same prompts, same number of new tokens.

- this engine, in the type that its service would choose here;
- `transformers` generate (a static batch) and its continuous batching, in float32 and bfloat16;
- vLLM, in both types, where `--vllm-python` names the Python of an environment that has it.

Greedy, an end of text is never taken, prompts are new in every round and the same for all, rivals take turns within a
round and start it by turns. Seconds are medians over rounds and include the prefill; the best peer at a batch size is
the fastest one in any type. `tokens as generate` is the share of tokens that are those of `transformers` generate in
float32: below one where two tokens are nearly as likely, or in another type.
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
from _harness import parser, table, tell
from _peers import ContinuousPeer, EnginePeer, GeneratePeer, Peer, Prompts, VllmPeer
from _subjects import QWEN3_SHAPE, Subject, service_dtype, subject

Round = tuple[float, list[list[int]]]


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with subject(arguments.model) as chosen, ExitStack() as stack:
        peers = _peers(chosen, arguments)
        for peer in peers:
            stack.callback(peer.close)
        batches = {batch: _measure(chosen, peers, batch, arguments) for batch in arguments.batches}
    _report(arguments, peers, batches)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--model", default="tiny", help=f"tiny, smollm2, {QWEN3_SHAPE}, or a folder")
    options.add_argument("--batches", type=int, nargs="+", help="batch sizes; 1 8 32")
    options.add_argument("--prompt-tokens", type=int, default=16)
    options.add_argument("--new-tokens", type=int, help="tokens decoded for each prompt")
    options.add_argument("--rounds", type=int, help="turns of each rival")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], help="of this engine; its service's unless given")
    options.add_argument("--vllm-python", type=Path, help="the Python of an environment with vLLM")
    options.add_argument("--threads", type=int, help="CPU threads of each rival; torch's default")
    arguments = options.parse_args()
    large = arguments.model == QWEN3_SHAPE
    arguments.batches = arguments.batches or ([1, 8] if arguments.quick and large else [1, 8, 32])
    arguments.new_tokens = arguments.new_tokens or (8 if arguments.quick else 32) * (1 if large else 4)
    arguments.rounds = arguments.rounds or (1 if large and arguments.quick else 3 if large or arguments.quick else 7)
    return arguments


def _peers(chosen: Subject, arguments: argparse.Namespace) -> list[Peer]:
    batch, length = max(arguments.batches), arguments.prompt_tokens + arguments.new_tokens
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else service_dtype()
    peers: list[Peer] = [EnginePeer(chosen, dtype, batch, length)]
    pad = chosen.tokenizer.pad_token_id
    for each in (torch.float32, torch.bfloat16):
        model = chosen.load(each)
        peers += [GeneratePeer(model, pad), ContinuousPeer(model, pad, batch, length)]
        if arguments.vllm_python:
            peers.append(VllmPeer(arguments.vllm_python, chosen, each, batch, length))
    return peers


def _measure(chosen: Subject, peers: Sequence[Peer], batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[Round]] = {peer.name: [] for peer in peers}
    for peer in peers:  # what is compiled or packed at first use
        peer.generate(_prompts(chosen, batch, -1, arguments.prompt_tokens), 2)
    for index in range(arguments.rounds):
        prompts = _prompts(chosen, batch, index, arguments.prompt_tokens)
        for turn in range(len(peers)):
            peer = peers[(index + turn) % len(peers)]
            rounds[peer.name].append(peer.generate(prompts, arguments.new_tokens))
    return {
        peer.name: {
            "tokens_per_second": batch * arguments.new_tokens / statistics.median(s for s, _ in rounds[peer.name])
        }
        for peer in peers
    }


def _prompts(chosen: Subject, batch: int, index: int, length: int) -> Prompts:
    drawn = random.Random(1000 * batch + index)
    reserved = {chosen.tokenizer.eos_token_id, *chosen.tags}
    words = [token for token in range(len(chosen.tokenizer)) if token not in reserved]
    return [drawn.choices(words, k=length) for _ in range(batch)]


def _report(arguments: argparse.Namespace, peers: Sequence[Peer], batches: dict[int, dict[str, Any]]) -> None:
    rows = [[peer.name, *(batches[batch][peer.name]["tokens_per_second"] for batch in batches)] for peer in peers]
    figures = {"benchmark": "engine_autoregressive", "batches": batches, "ratios": {"x": 1}}
    tell(figures, as_json=arguments.json, tables=[table("tokens/s", ["rival", *map(str, batches)], rows)])


if __name__ == "__main__":
    main()
