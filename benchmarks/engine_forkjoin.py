"""Parallel against autoregressive decoding of the same token trees by the same engine, and both against their bounds.

The trees are forced (`record/script.py`): every rival decodes the same tokens of the same responses.

- `parallel`: fork and join, as the trees say; forced tokens are fed in one pass.
- `autoregressive`: the same responses as one causal sequence each, in the same batch, by the same engine.
- the bare steps (`_roofline.py`): what the parallel steps would cost if they did only what memory and arithmetic ask
  for. In a block of n branches that is the roofline for a batch of n.
- the critical-path bound of the time to answer: tokens on the critical path, each at the autoregressive step of this
  engine. Forced tokens are fed in one pass, so it can be beaten.

First one tree of equal branches, in rounds; then fork and join by themselves, in trees of many short blocks; then
batches of trees; then, where the model forks by itself, what it answers to held-out problems.

A fork's two steps (the one that samples `</guideline>`, and the one that feeds the headers) are held against a median
step of the trunk and a median step of the block; a join's likewise. What they take more is told in three ways:

- `extra`: as it is. Most of it is the feeding of the forced tokens, which are tokens like all others.
- beyond the same tokens in plain steps: less a step of the block for each token of the longest header and a step of the
  trunk for each token of the cue. This is what fork and join cost: nothing, or less, where feeding many forced tokens
  in one pass saves more than validation, page tables and the record take.
- beyond the bare feeding: less what the matrix products of the forced tokens take alone (`_roofline.py`).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _forkjoin import Load, TreeBench
from _harness import parser, progress, speed, stall_note, table, tell
from _subjects import QWEN3_SHAPE, subject
from rich.table import Table

Figures = dict[str, Any]


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    load = Load(arguments.branches, arguments.branch_tokens, arguments.prompt_tokens, arguments.rounds)
    rounds = 1 if arguments.model == QWEN3_SHAPE else min(3, arguments.rounds)
    pieces = load.rounds + 2 + len(arguments.trees) + bool(arguments.own_trees)
    with subject(arguments.model) as chosen, progress(pieces) as begin:
        bench = TreeBench(chosen, arguments.dtype, load, begin)
        figures: Figures = {
            "benchmark": "engine_forkjoin",
            "model": arguments.model,
            "threads": torch.get_num_threads(),
            **vars(load),
            "one_tree": bench.one_tree(),
            "fork_and_join": bench.fork_and_join(arguments.blocks),
            "batches": {str(count): bench.batch(count, rounds) for count in arguments.trees},
            "own_trees": bench.own(arguments.own_trees) if arguments.own_trees else None,
        }
    figures["ratios"] = _ratios(figures)
    tell(figures, as_json=arguments.json, tables=_tables(figures))


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--model", default="tiny", help=f"tiny, smollm2, {QWEN3_SHAPE}, or a folder")
    options.add_argument("--branches", type=int, default=8, help="branches of a block")
    options.add_argument("--branch-tokens", type=int, help="tokens that a branch samples")
    options.add_argument("--prompt-tokens", type=int, default=48)
    options.add_argument("--rounds", type=int, help="turns of each rival; medians count")
    options.add_argument("--blocks", type=int, help="blocks in which fork and join are measured")
    options.add_argument(
        "--trees", type=int, nargs="*", help="batches of trees, of branches of a quarter of the length"
    )
    options.add_argument("--own-trees", type=int, help="trajectories that the model writes itself; 0: none")
    options.add_argument("--dtype", default="auto", help="of the weights; auto, the service's choice: as saved")
    options.add_argument("--threads", type=int, help="CPU threads; torch's default unless given")
    arguments = options.parse_args()
    large, quick = arguments.model == QWEN3_SHAPE, arguments.quick
    defaults = {
        "branch_tokens": 16 if quick else 64,
        "rounds": 1 if quick and large else 3 if large or quick else 9,
        "blocks": 2 if quick and large else 12 if large or quick else 48,
        "trees": [] if quick and large else [1, 8, 32],
        "own_trees": 0 if arguments.model != "tiny" else 16 if quick else 48,
    }
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def _ratios(figures: Figures) -> dict[str, float]:
    """Against the rivals and the bounds; more than 1 is better, but for what is counted in decode steps."""
    one, memory, costs = figures["one_tree"], figures["one_tree"]["memory"], figures["fork_and_join"]
    forced, plain = (
        sum(costs[name][f"forced_tokens_{how}_seconds"] for name in ("fork", "join")) for how in ("bare", "plain")
    )
    extra, step = costs["fork_and_join_seconds"], costs["block_step_seconds"]
    ratios = {
        "tokens/s vs autoregressive": one["autoregressive_seconds"] / one["parallel_seconds"],
        "total tokens / critical-path tokens": one["tokens"] / one["critical_tokens"],
        "tokens/s vs the same steps, bare": one["bare_seconds"] / one["parallel_seconds"],
        "in the block, tokens/s vs the roofline": one["bare_block_step_seconds"] / one["block_step_seconds"],
        "time to answer vs the critical-path bound": one["critical_path_seconds"] / one["parallel_seconds"],
        "KV pages vs independent samples": memory["independent_pages"] / memory["peak_pages"],
        "KV bytes read vs each branch by itself": memory["kv_bytes_attended_per_block_step"]
        / memory["kv_bytes_read_per_block_step"],
        "fork + join, extra, in the block's steps": extra / step,
        "fork + join beyond the same tokens in plain steps, in the block's steps": (extra - plain) / step,
        "fork + join beyond the bare feeding, in the block's steps": (extra - forced) / step,
    }
    for count, batch in figures["batches"].items():
        ratios[f"trees {count}, tokens/s vs autoregressive"] = _speed_up(batch)
    if own := figures["own_trees"]:
        ratios["own trees, tokens/s vs autoregressive"] = _speed_up(own)
        ratios["own trees, steps vs autoregressive"] = own["steps_autoregressive"] / own["steps_parallel"]
        ratios["own trees, time to answer vs autoregressive"] = (
            own["answer_seconds_autoregressive"] / own["answer_seconds_parallel"]
        )
    return ratios


def _speed_up(compared: Figures) -> float:
    ratio: float = compared["tokens_per_second_parallel"] / compared["tokens_per_second_autoregressive"]
    return ratio


def _tables(figures: Figures) -> list[Table]:
    parts = [_goals_table, _time_table, _bounds_table, _cost_table, _memory_table]
    if figures["batches"] or figures["own_trees"]:
        parts.append(_batch_table)
    return [part(figures) for part in parts]


def _goals_table(figures: Figures) -> Table:
    one, memory, ratios = figures["one_tree"], figures["one_tree"]["memory"], figures["ratios"]
    n = figures["branches"]
    rows = [
        ["tokens/s, parallel / autoregressive", ratios["tokens/s vs autoregressive"], "4.6, or the next 0.9"],
        ["  total / critical-path tokens", ratios["total tokens / critical-path tokens"], ""],
        [f"in the block, roofline of {n} rows / step", ratios["in the block, tokens/s vs the roofline"], "0.9"],
        ["  which is bound by", one["block_bound"], ""],
        ["the same steps, bare / all steps", ratios["tokens/s vs the same steps, bare"], ""],
        ["critical-path bound / time to answer", ratios["time to answer vs the critical-path bound"], "0.9"],
        ["KV pages held at most", memory["peak_pages"], f"at most {memory['prefix_and_own_pages']} + {n}"],
        [
            "fork + join beyond the same tokens in plain steps, in steps",
            ratios["fork + join beyond the same tokens in plain steps, in the block's steps"],
            "at most 1",
        ],
        ["  beyond the bare feeding", ratios["fork + join beyond the bare feeding, in the block's steps"], ""],
        ["  all that is extra", ratios["fork + join, extra, in the block's steps"], ""],
        ["scheduling, share of the block's steps", one["block_scheduling_share"], "at most 0.1"],
    ]
    note = f"The goals are for {QWEN3_SHAPE}."
    if figures["model"] != QWEN3_SHAPE:
        rows = [[name, measured, ""] for name, measured, _ in rows]
    load = f"{n} branches of {figures['branch_tokens']} tokens, threads: {figures['threads']}"
    return table(f"{figures['model']}, one tree of {load}", ["", "measured", "goal"], rows, note)


def _time_table(figures: Figures) -> Table:
    one = figures["one_tree"]
    rows = [
        [
            "parallel",
            speed(one["tokens"] / one["parallel_seconds"], stalled=one["parallel_stalled"]),
            one["parallel_seconds"],
            1e3 * one["block_step_seconds"],
        ],
        [
            "autoregressive",
            speed(one["tokens"] / one["autoregressive_seconds"], stalled=one["autoregressive_stalled"]),
            one["autoregressive_seconds"],
            1e3 * one["autoregressive_step_seconds"],
        ],
        [
            "the parallel steps, bare",
            one["tokens"] / one["bare_seconds"],
            one["bare_seconds"],
            1e3 * one["bare_block_step_seconds"],
        ],
        ["critical-path bound", one["tokens"] / one["critical_path_seconds"], one["critical_path_seconds"], None],
    ]
    title = f"Time: {one['tokens']} tokens, {one['critical_tokens']} on the critical path"
    note = stall_note(one["parallel_stalled"] or one["autoregressive_stalled"])
    return table(title, ["", "tokens/s", "seconds to answer", "decode step, ms"], rows, note)


def _bounds_table(figures: Figures) -> Table:
    one = figures["one_tree"]
    rows = [
        [
            f"{count} rows",
            1e3 * bound["linears"],
            bound["kernel"],
            1e3 * bound["memory"],
            1e3 * bound["compute"],
            "memory" if bound["memory"] >= bound["compute"] else "compute",
        ]
        for count, bound in sorted(one["bounds"].items(), key=lambda item: int(item[0]))
    ]
    title = f"Bare steps, {one['bandwidth'] / 1e9:.3g} GB/s, {one['peak'] / 1e9:.3g} GFLOP/s"
    return table(title, ["", "linears, ms", "fastest kernel", "memory bound, ms", "compute bound, ms", "bound"], rows)


def _cost_table(figures: Figures) -> Table:
    costs = figures["fork_and_join"]
    rows = [
        [
            name,
            1e3 * costs[name]["seconds"],
            " to ".join(f"{1e3 * end:.3g}" for end in costs[name]["interval"]),
            1e3 * costs[name]["scheduling_seconds"],
            1e3 * costs[name]["forced_tokens_bare_seconds"],
            1e3 * costs[name]["forced_tokens_plain_seconds"],
            costs[name]["seconds"] / costs["block_step_seconds"],
        ]
        for name in ("fork", "join")
    ]
    title = (
        f"Fork ({costs['header_tokens']} forced tokens), join ({costs['cue_tokens']}): medians of {costs['blocks']}\n"
        f"A step of the block: {1e3 * costs['block_step_seconds']:.3g} ms; "
        f"of the trunk: {1e3 * costs['trunk_step_seconds']:.3g} ms"
    )
    columns = ["", "extra ms", "95%", "of it scheduling", "forced tokens, bare", "in plain steps", "extra, in steps"]
    return table(title, columns, rows)


def _memory_table(figures: Figures) -> Table:
    memory, n = figures["one_tree"]["memory"], figures["branches"]
    pages = {
        "held at most": "peak_pages",
        "prefix + own tokens, each part from a fresh page": "prefix_and_own_pages",
        f"{n} independent samples": "independent_pages",
        f"{n} independent samples that share the prompt": "independent_pages_shared_prompt",
    }
    rows = [[name, memory[key], memory[key] * memory["page_bytes"] / 1e6] for name, key in pages.items()]
    rows.append(["read by a step of the block", None, memory["kv_bytes_read_per_block_step"] / 1e6])
    rows.append(["the same, each branch by itself", None, memory["kv_bytes_attended_per_block_step"] / 1e6])
    return table("Keys and values", ["", "pages", "MB"], rows)


def _batch_table(figures: Figures) -> Table:
    measured = {f"{count} trees": batch for count, batch in figures["batches"].items()}
    if own := figures["own_trees"]:
        measured[f"{own['trees']} trees of the model's own"] = own
    rows = [
        [
            name,
            batch["tokens_per_second_parallel"],
            speed(batch["tokens_per_second_autoregressive"], stalled=batch["autoregressive_stalled"]),
            _speed_up(batch),
            batch["tokens"] / batch["critical_tokens"],
            batch["scheduling_share"],
        ]
        for name, batch in measured.items()
    ]
    columns = ["", "tokens/s, parallel", "autoregressive", "ratio", "tokens / critical", "scheduling share"]
    note = stall_note(any(batch["autoregressive_stalled"] for batch in measured.values()))
    return table("Trees decoded at once", columns, rows, note)


if __name__ == "__main__":
    main()
