"""What `engine_forkjoin.py` measures: decodings of forced trees, and what their steps say."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from _decoding import Decoding, Step, is_stalled
from _harness import Begin, median_interval
from _roofline import Roofline
from _subjects import Subject
from _trees import PAGE_SIZE, cues, decode_trees, equal_tree, own_trees

from npr_common.topology import topology
from npr_rollout.engine.model_runner import kv_shape
from npr_rollout.record.outcomes import Visibility
from npr_rollout.testing.trees import Tree

Figures = dict[str, Any]
_MODES = (Visibility.PARALLEL, Visibility.SEQUENTIAL)
_SHORT_BRANCH = 8  # sampled tokens of a branch, where fork and join are measured


class Role(Enum):
    """What a step of one tree feeds."""

    PROMPT = auto()
    TRUNK = auto()
    HEADERS = auto()
    BRANCHES = auto()
    CUE = auto()


@dataclass(frozen=True)
class Load:
    """The trees of equal branches, and how often they are decoded."""

    branches: int
    branch_tokens: int
    prompt_tokens: int
    rounds: int


class TreeBench:
    """Measures one model."""

    def __init__(self, subject: Subject, dtype: str, load: Load, begin: Begin) -> None:
        begin("loading the model")
        self._begin = begin
        self._subject = subject
        self._load = load
        self._model = subject.load(dtype)
        headers, takeaway = cues(subject, load.branches)
        self._longest_header = max(map(len, headers))
        self._rows = {
            Role.PROMPT: load.prompt_tokens,
            Role.TRUNK: 1,
            Role.HEADERS: 1 + sum(map(len, headers)),
            Role.BRANCHES: load.branches,
            Role.CUE: load.branches + len(takeaway),
        }
        self._trees = 0
        for mode in _MODES:  # what is compiled or packed at first use
            self._decode([self._tree(branch_tokens=4)], mode)
        self.bytes_per_token = kv_shape(self._model).bytes_per_token
        self._roofline = Roofline(self._model, subject.linears, list(self._rows.values()))

    # --- one tree ---

    def one_tree(self) -> Figures:
        """A tree at a time, in rounds, beside the bare steps."""
        decodings: dict[Visibility, list[Decoding]] = {mode: [] for mode in _MODES}
        for index in range(self._load.rounds):
            self._begin(f"one tree: round {index + 1} of {self._load.rounds}")
            tree = self._tree()
            for mode in _MODES if index % 2 else reversed(_MODES):
                decodings[mode].append(self._decode([tree], mode))
            self._roofline.sample()
        return self._speeds(*(decodings[mode] for mode in _MODES)) | {
            "memory": self._memory(tree, decodings[Visibility.PARALLEL]),
            "bounds": {str(self._rows[role]): vars(self._roofline.bound(self._rows[role])) for role in Role},
            "bandwidth": self._roofline.bandwidth,
            "peak": self._roofline.peak,
        }

    def _speeds(self, parallel: Sequence[Decoding], autoregressive: Sequence[Decoding]) -> Figures:
        n = self._load.branches
        block = statistics.median(self._of(parallel, Role.BRANCHES, lambda step: step.seconds))
        kv_read = statistics.mean(self._of(parallel, Role.BRANCHES, lambda step: step.kv_tokens_read))
        bare = self._roofline.seconds(n, kv_read * self.bytes_per_token)
        step = statistics.median(step.seconds for done in autoregressive for step in done.steps[1:])
        critical = parallel[0].results[0].ledger.critical_path_tokens
        return {
            "tokens": parallel[0].tokens,
            "critical_tokens": critical,
            "parallel_seconds": statistics.median(done.seconds for done in parallel),
            "autoregressive_seconds": statistics.median(done.seconds for done in autoregressive),
            "bare_seconds": statistics.median(map(self._bare, parallel)),
            "block_step_seconds": block,
            "bare_block_step_seconds": bare,
            "block_bound": self._roofline.bound(n).at,
            "autoregressive_step_seconds": step,
            "bare_autoregressive_step_seconds": self._roofline.bound(1).linears,
            "autoregressive_bound": self._roofline.bound(1).at,
            "critical_path_seconds": critical * step,
            "parallel_stalled": is_stalled(parallel),
            "autoregressive_stalled": is_stalled(autoregressive),
            "shares": Decoding([step for done in parallel for step in done.steps], []).shares(),
            "block_scheduling_share": _scheduling_share(self._of(parallel, Role.BRANCHES, lambda step: step)),
        }

    def _memory(self, tree: Tree, parallel: Sequence[Decoding]) -> Figures:
        """KV pages against what is unavoidable and against independent samples; KV bytes that a block's step reads."""
        shape = topology(tree.token_ids, tree.prompt_length, self._subject.tags)
        branch_of = shape.branch_of.tolist()
        first = branch_of.index(0)
        spans = [branch_of.count(index) for index in range(self._load.branches)]
        rest = len(tree.token_ids) - first - sum(spans)
        alone = [first + span + rest for span in spans]
        steps = self._of(parallel, Role.BRANCHES, lambda step: step)
        read, attended = (
            self.bytes_per_token * statistics.mean(getattr(step, name) for step in steps)
            for name in ("kv_tokens_read", "kv_tokens_attended")
        )
        return {
            "page_bytes": PAGE_SIZE * self.bytes_per_token,
            "peak_pages": max(done.results[0].ledger.peak_pages for done in parallel),
            "prefix_and_own_pages": _pages(first) + sum(map(_pages, spans)) + _pages(rest),
            "independent_pages": sum(map(_pages, alone)),
            "independent_pages_shared_prompt": _pages(tree.prompt_length)
            + sum(_pages(tokens - tree.prompt_length) for tokens in alone),
            "kv_bytes_read_per_block_step": read,
            "kv_bytes_attended_per_block_step": attended,
        }

    # --- fork and join ---

    def fork_and_join(self, blocks: int) -> Figures:
        """What fork and join take more than plain steps, in trees of short blocks, one tree at a time."""
        self._begin(f"fork and join: {blocks} blocks")
        short = self._tree(branch_tokens=_SHORT_BRANCH)
        in_block = len(short.token_ids) - short.prompt_length
        in_tree = max(1, min(4, blocks, (self._subject.config.max_position_embeddings - 64) // in_block))
        decodings = [
            self._decode([self._tree(branch_tokens=_SHORT_BRANCH, blocks=in_tree)], Visibility.PARALLEL)
            for _ in range(-(-blocks // in_tree))
        ]
        forks, joins = ("forks", Role.HEADERS), ("joins", Role.CUE)
        extra = {name: self._extra(decodings, name, role, lambda s: s.seconds) for name, role in (forks, joins)}
        own = {name: self._extra(decodings, name, role, lambda s: s.scheduling) for name, role in (forks, joins)}
        bare = {role: self._roofline.bound(self._rows[role]).linears for role in Role}
        step = statistics.median(self._of(decodings, Role.BRANCHES, lambda step: step.seconds))
        trunk = statistics.median(self._of(decodings, Role.TRUNK, lambda step: step.seconds))
        cue = self._rows[Role.CUE] - self._load.branches
        both = [fork + join for fork, join in zip(extra["forks"], extra["joins"], strict=True)]
        return {
            "blocks": len(both),
            "fork": _cost(extra["forks"], own["forks"])
            | {
                "forced_tokens_bare_seconds": bare[Role.HEADERS] - bare[Role.BRANCHES],
                "forced_tokens_plain_seconds": self._longest_header * step,
            },
            "join": _cost(extra["joins"], own["joins"])
            | {
                "forced_tokens_bare_seconds": bare[Role.CUE] - bare[Role.TRUNK],
                "forced_tokens_plain_seconds": cue * trunk,
            },
            "fork_and_join_seconds": statistics.median(both),
            "fork_and_join_interval": median_interval(both),
            "block_step_seconds": step,
            "trunk_step_seconds": trunk,
            "header_tokens": self._rows[Role.HEADERS] - 1,
            "cue_tokens": cue,
        }

    def _extra(self, decodings: Sequence[Decoding], count: str, role: Role, of: Callable[[Step], float]) -> list[float]:
        """For each fork or join: its step and the one after, less a plain step of the trunk and one of the branches."""
        extra = []
        for done in decodings:
            plain = sum(statistics.median(self._of([done], each, of)) for each in (Role.TRUNK, Role.BRANCHES))
            places = [index for index, step in enumerate(done.steps) if getattr(step, count)]
            assert all(self._roles(done)[index + 1] is role for index in places)
            extra += [of(done.steps[index]) + of(done.steps[index + 1]) - plain for index in places]
        return extra

    # --- many trees ---

    def batch(self, count: int, rounds: int) -> Figures:
        """Several trees at once, with branches of a quarter of the length."""
        self._begin(f"trees at once: {count}")
        trees = [self._tree(branch_tokens=max(4, self._load.branch_tokens // 4)) for _ in range(count)]
        return self._compare(trees, rounds)

    def own(self, count: int) -> Figures:
        """Trees that the model writes itself: all at once, and one at a time."""
        self._begin(f"trees of the model's own: {count}")
        trees = own_trees(self._model, self._subject, count)
        answers = [[self._decode([tree], mode) for mode in _MODES] for tree in trees]
        parallel, autoregressive = ([answer[index] for answer in answers] for index in range(len(_MODES)))
        return self._compare(trees, self._load.rounds) | {
            "trees": count,
            "autoregressive_stalled": False,  # its last steps hold few trees: they say nothing of the first ones
            "steps_parallel": sum(len(done.steps) for done in parallel),
            "steps_autoregressive": sum(len(done.steps) for done in autoregressive),
            "answer_seconds_parallel": statistics.median(done.seconds for done in parallel),
            "answer_seconds_autoregressive": statistics.median(done.seconds for done in autoregressive),
        }

    def _compare(self, trees: Sequence[Tree], rounds: int) -> Figures:
        decodings = [[self._decode(trees, mode) for mode in _MODES] for _ in range(rounds)]
        seconds = [statistics.median(both[index].seconds for both in decodings) for index in range(len(_MODES))]
        tokens = decodings[0][0].tokens
        return {
            "tokens": tokens,
            "critical_tokens": sum(result.ledger.critical_path_tokens for result in decodings[0][0].results),
            "tokens_per_second_parallel": tokens / seconds[0],
            "tokens_per_second_autoregressive": tokens / seconds[1],
            "autoregressive_stalled": is_stalled([both[1] for both in decodings]),
            "scheduling_share": decodings[-1][0].shares()["scheduling"],
        }

    # --- parts ---

    def _tree(self, *, branch_tokens: int | None = None, blocks: int = 1) -> Tree:
        """A tree that was not there before."""
        self._trees += 1
        return equal_tree(
            self._subject,
            random.Random(self._trees),
            branches=self._load.branches,
            branch_tokens=branch_tokens or self._load.branch_tokens,
            prompt_tokens=self._load.prompt_tokens,
            blocks=blocks,
        )

    def _decode(self, trees: Sequence[Tree], mode: Visibility) -> Decoding:
        return decode_trees(self._model, self._subject, trees, mode)

    def _roles(self, done: Decoding) -> list[Role]:
        """What each step of one tree of equal branches has fed."""
        roles = [Role.PROMPT]
        for before, step in zip(done.steps, done.steps[1:], strict=False):
            plain = Role.TRUNK if step.tokens == 1 else Role.BRANCHES
            roles.append(Role.HEADERS if before.forks else Role.CUE if before.joins else plain)
        return roles

    def _of(self, decodings: Sequence[Decoding], role: Role, of: Callable[[Step], Any]) -> list[Any]:
        """Of every step with this role that neither forks nor joins."""
        return [
            of(step)
            for done in decodings
            for step, each in zip(done.steps, self._roles(done), strict=True)
            if each is role and not step.forks and not step.joins
        ]

    def _bare(self, done: Decoding) -> float:
        """Seconds of the same steps, bare."""
        return sum(
            self._roofline.seconds(self._rows[role], step.kv_tokens_read * self.bytes_per_token)
            for step, role in zip(done.steps, self._roles(done), strict=True)
        )


def _cost(extra: Sequence[float], scheduling: Sequence[float]) -> Figures:
    return {
        "seconds": statistics.median(extra),
        "interval": median_interval(extra),
        "scheduling_seconds": statistics.median(scheduling),
    }


def _scheduling_share(steps: Sequence[Step]) -> float:
    return Decoding(list(steps), []).shares()["scheduling"]


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)
