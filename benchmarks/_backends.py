"""What `engine_backends.py` measures: the same forced trees on both engine backends, by what their clients see.

Nothing is asked of an engine but its events, so both are measured alike, the way to the server included.
"""

from __future__ import annotations

import itertools
import queue
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from _subjects import DIALECT, Subject
from _trees import cues

from npr_common.topology import topology
from npr_rollout.backend import DecodingEngine
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.scripted import ScriptedSampler
from npr_rollout.record.outcomes import Outcome, Visibility
from npr_rollout.record.request import FinishedEvent, Limits, Request, SamplingParams
from npr_rollout.record.script import Script
from npr_rollout.sglang.engine import SglangEngine
from npr_rollout.sglang.limits import ServerLimits
from npr_rollout.sglang.server import ServedModel
from npr_rollout.sglang.transport import Transport
from npr_rollout.sglang.wire import Ask, End, Ended, Tokens
from npr_rollout.testing.sglang_servers import settings_for, sglang_server
from npr_rollout.testing.trees import Tree
from npr_sglang.contract import Params

PAGE_SIZE = 16
_SLACK = 4  # tokens that a limit leaves, so that no branch meets it


class Backend(Protocol):
    """Makes engines that follow scripts."""

    name: str

    def engine(self, scripts: dict[str, Script], trees: int) -> DecodingEngine:
        """A fresh engine with room for so many trees at once."""
        ...

    def seals(self, blocks: int, branches: int) -> list[float]:
        """Of the tree that was decoded last: seconds that each block's branches took to be sealed after their end."""
        ...

    def feeding(self, tree: Tree, blocks: int, branches: int) -> list[Feeding]:
        """What each block's forced tokens take it without fork and join; nothing where its requests can't show it."""
        ...


@dataclass(frozen=True)
class Feeding:
    """Seconds to the first tokens of sequences that no fork or join made, all before their forced tokens in the cache.

    Attributes:
        fork: of a sequence a branch, with `</guideline>` and the branch's header to be computed.
        join: of one with the cue of a `<takeaway>` to be computed.
    """

    fork: float
    join: float


class TorchBackend:
    """The engine of this process, as its service runs it."""

    def __init__(self, subject: Subject, dtype: str, pool_tokens: int) -> None:
        self._subject = subject
        self._model = subject.load(dtype)
        self._pages = pool_tokens // PAGE_SIZE
        self.name = "torch"

    def engine(self, scripts: dict[str, Script], trees: int) -> DecodingEngine:
        """See `Backend`."""
        config = EngineConfig(page_size=PAGE_SIZE, pages=self._pages, max_running=trees)
        return Engine(self._model, self._subject.tokenizer, DIALECT, config, sampler=ScriptedSampler(scripts))

    def seals(self, blocks: int, branches: int) -> list[float]:
        """The last token of a branch is fed with the cue: nothing is to be sealed."""
        return [0.0] * blocks

    def feeding(self, tree: Tree, blocks: int, branches: int) -> list[Feeding]:
        """Nothing: it has no cache of prefixes. `engine_forkjoin.py` measures it by the engine's own steps."""
        return []


class _Clocked(queue.SimpleQueue[Tokens | Ended]):
    """Arrivals that remember when each stream's last tokens came, and when its end did."""

    def __init__(self) -> None:
        super().__init__()
        self.last_tokens: dict[str, float] = {}
        self.ends: dict[str, float] = {}

    def put(self, item: Tokens | Ended, block: bool = True, timeout: float | None = None) -> None:
        """Take one in."""
        (self.ends if isinstance(item, Ended) else self.last_tokens)[item.name] = time.perf_counter()
        super().put(item, block, timeout)


class SglangBackend:
    """An engine on an SGLang server with the plug-in.

    Attributes:
        arrivals: what has come from the server since the last engine was made.
    """

    def __init__(self, subject: Subject, transport: Transport, version: str, told: Mapping[str, Any]) -> None:
        self._subject = subject
        self._transport = transport
        self._told = told
        self.name = f"sglang {version}"
        self.arrivals = _Clocked()
        self._fed = itertools.count()

    def engine(self, scripts: dict[str, Script], trees: int) -> DecodingEngine:
        """See `Backend`."""
        self._transport.ask(lambda client: client.flush())
        self.arrivals = self._transport.arrivals = _Clocked()
        limits = ServerLimits.told(
            self._told,
            context=self._subject.config.max_position_embeddings,
            vocab_size=self._subject.config.vocab_size,
            max_running=trees,
            max_branches=64,
            max_blocks=64,
        )
        ends = frozenset({self._subject.tokenizer.eos_token_id})
        return SglangEngine(self._transport, self._subject.tokenizer, DIALECT, limits, eos=ends, scripts=scripts)

    def seals(self, blocks: int, branches: int) -> list[float]:
        """See `Backend`. Streams are asked for in order: the trunk, a block's branches, the trunk..."""
        names = sorted(self.arrivals.ends, key=lambda name: int(name.split(".")[1]))
        found = []
        for block in range(blocks):
            own = names[block * (branches + 1) + 1 : (block + 1) * (branches + 1)]
            ended, said = (max(of[name] for name in own) for of in (self.arrivals.ends, self.arrivals.last_tokens))
            found.append(ended - said)
        return found

    def feeding(self, tree: Tree, blocks: int, branches: int) -> list[Feeding]:
        """See `Backend`: by requests that the plug-in has nothing to do with."""
        ids = list(tree.token_ids)
        shape = topology(ids, tree.prompt_length, self._subject.tags)
        headers, cue = cues(self._subject, branches)
        found = []
        for block in range(blocks):
            own = np.flatnonzero((shape.block_of == block) & (shape.branch_of >= 0))
            close, end = int(own[0]) - 1, int(own[-1]) + 1
            fork = self._feed(ids[:close], [[ids[close], *header] for header in headers])
            found.append(Feeding(fork, self._feed(ids[:end], [cue])))
        return found

    def _feed(self, prefix: list[int], tails: Sequence[Sequence[int]]) -> float:
        self._first_tokens([prefix])
        return self._first_tokens([[*prefix, *tail] for tail in tails])

    def _first_tokens(self, inputs: Sequence[list[int]]) -> float:
        """Seconds until each of the sequences has told its first token."""
        self.arrivals = self._transport.arrivals = _Clocked()
        asks = [
            Ask(f"bare.{next(self._fed)}", each, 1, (), SamplingParams(), Params(), at_once=True) for each in inputs
        ]
        begin = time.perf_counter()
        self._transport.begin(asks)
        while len(self.arrivals.ends) < len(asks):
            arrival = self.arrivals.get()
            if isinstance(arrival, Ended) and arrival.end is not End.LENGTH:
                raise RuntimeError(f"{self.name}: {arrival.name} ended as {arrival.end.name}")
        return max(self.arrivals.last_tokens.values()) - begin


@contextmanager
def sglang_backend(python: Path, subject: Subject, dtype: str, pool_tokens: int, threads: int) -> Iterator[Backend]:
    """A server with a model, and engines on it."""
    model = ServedModel(subject.folder, subject.config.max_position_embeddings, dtype)
    with sglang_server(model, settings_for(str(python), pool_tokens, threads=threads)) as transport:
        told = transport.ask(lambda client: client.info())
        yield SglangBackend(subject, transport, str(told["version"]), told)


@dataclass
class Answer:
    """One trajectory, as its client saw it: `news` are (seconds, block) of each step that sampled for it, in order."""

    submitted: float
    finished: float = 0.0
    news: list[tuple[float, int]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Time to answer."""
        return self.finished - self.submitted

    def hear(self, now: float, block: int) -> None:
        """A step has sampled for a block, or (-1) for the trunk."""
        if not self.news or self.news[-1] != (now, block):
            self.news.append((now, block))


@dataclass
class Decoding:
    """A load, decoded."""

    answers: list[Answer]
    tokens: int

    @property
    def seconds(self) -> float:
        """From the first request to the last answer."""
        return max(a.finished for a in self.answers) - min(a.submitted for a in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the prompts, forced ones included."""
        return self.tokens / self.seconds

    @property
    def time_to_answer(self) -> float:
        """Median over the trajectories, in seconds."""
        return statistics.median(answer.seconds for answer in self.answers)


def decode(
    backend: Backend, subject: Subject, trees: Sequence[Tree], visibility: Visibility, *, watch: bool = False
) -> Decoding:
    """Decode trees at once; `watch` has each token told as it comes.

    Raises:
        RuntimeError: one of them did not say what it was to say.
    """
    tags = subject.tags if visibility is Visibility.PARALLEL else None
    scripts = {f"t{i}": Script.of(tree.token_ids, tree.prompt_length, tags) for i, tree in enumerate(trees)}
    engine = backend.engine(scripts, len(trees))
    answers: dict[str, Answer] = {}
    for name, tree in zip(scripts, trees, strict=True):
        limits = Limits(max_tokens=len(tree.token_ids) - tree.prompt_length + _SLACK)
        answers[name] = Answer(time.perf_counter())
        engine.submit(Request(name, tree.prompt, limits=limits, visibility=visibility, stream=watch))
    expected = dict(zip(scripts, trees, strict=True))
    while not engine.idle:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, FinishedEvent):
                result = event.result
                if result.outcome is not Outcome.COMPLETED or result.token_ids != expected[result.request_id].token_ids:
                    raise RuntimeError(f"{backend.name}: {result.request_id} ended as {result.outcome.name}")
                answers[result.request_id].finished = now
            elif not all(event.forced):
                answers[event.request_id].hear(now, event.block)
    return Decoding(list(answers.values()), sum(len(tree.token_ids) - tree.prompt_length for tree in trees))


@dataclass(frozen=True)
class BlockCosts:
    """What fork and join took more than plain steps, in seconds, for each block of a tree.

    Attributes:
        steps: plain steps of the blocks; `trunk_steps` of the trunk.
        forks: from `</guideline>` to the branches' first tokens, less a plain step of the block.
        joins: from the branches' last tokens to the first one of what follows, less a plain step of the trunk; seals
            included.
        seals: the part of `joins` that passes before the keys and values of all branches are written.
    """

    steps: list[float]
    trunk_steps: list[float]
    forks: list[float]
    joins: list[float]
    seals: list[float]


def block_costs(backend: Backend, subject: Subject, tree: Tree, blocks: int, branches: int) -> BlockCosts:
    """Decode one tree, and take the time of each of its steps as its client sees them."""
    (answer,) = decode(backend, subject, [tree], Visibility.PARALLEL, watch=True).answers
    gaps: dict[tuple[bool, bool], list[float]] = {}
    for (before, at), (now, then) in itertools.pairwise(answer.news):
        gaps.setdefault((at >= 0, then >= 0), []).append(now - before)
    steps, trunk_steps = gaps[True, True], gaps[False, False]
    step, trunk_step = statistics.median(steps), statistics.median(trunk_steps)
    forks, joins = gaps[False, True], gaps[True, False]
    assert len(forks) == len(joins) == blocks
    return BlockCosts(
        steps,
        trunk_steps,
        [gap - step for gap in forks],
        [gap - trunk_step for gap in joins],
        backend.seals(blocks, branches),
    )
