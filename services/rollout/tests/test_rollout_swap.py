"""Swapping engines between two steps: what becomes of what is decoded, of those who wait, of the memory, of faults."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from npr.types.v1 import policy_pb2
from npr_common.dialects import load_dialect
from npr_common.errors import FailedPreconditionError, InternalError, UnavailableError
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.sampling import RandomSampler, Samples
from npr_rollout.engine_thread import EngineThread, MakeRequest, Serving
from npr_rollout.engines import PROGRESS_STEPS, Engines
from npr_rollout.policy_loader import LoadedPolicy
from npr_rollout.record.outcomes import Outcome, Visibility
from npr_rollout.record.request import FinishedEvent, Limits, Request, Result, SamplingParams, TokensEvent
from npr_rollout.record.script import Script
from npr_rollout.serving import Submission
from npr_rollout.swap import InFlight, Swap, Swapped
from npr_rollout.testing.models import tagged_tokenizer, tiny_model
from npr_rollout.testing.trees import Tree, TreeMaker

TOKENIZER = tagged_tokenizer()
DIALECT = load_dialect("npr")
MAKER = TreeMaker(TOKENIZER, seed=7)
TREES = {f"tree{i}": MAKER.tree(blocks=3, branches=3, longest=12) for i in range(4)}
LETTER = TOKENIZER.encode("a", add_special_tokens=False)[0]
LONG = 60.0


class Gate:
    """Decodes the trees, and the same letter for others; stops in the first step with branches until it is opened."""

    def __init__(self) -> None:
        scripts = {name: Script.of(tree.token_ids, tree.prompt_length, MAKER.tags) for name, tree in TREES.items()}
        self._scripts = scripts
        self.reached, self.opened = threading.Event(), threading.Event()

    def sample(self, logits: Any, spans: Any) -> Samples:
        if any(span.is_branch for span in spans) and not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(LONG)
        return Samples([self._token(span) for span in spans], [-1.0] * len(spans))

    def _token(self, span: Any) -> int:
        script = self._scripts.get(span.owner.request.request_id)
        return script.tokens[span.end, span.branch] if script is not None else LETTER


class Breaks(RandomSampler):
    """Fails in the step of this number, and in all that follow."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._left = step

    def sample(self, logits: Any, spans: Any) -> Samples:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("a cosmic ray")
        return super().sample(logits, spans)


@dataclass
class Maker:
    """Builds engines of one version, one with each sampler and the last one again; remembers them weakly."""

    version: int
    samplers: list[Any] = field(default_factory=lambda: [None])
    made: list[weakref.ref[Any]] = field(default_factory=list)

    def __call__(self) -> Serving:
        sampler = self.samplers[min(len(self.made) // 3, len(self.samplers) - 1)]
        model = tiny_model("qwen3", TOKENIZER, self.version, hidden=16, layers=1)
        ref = policy_pb2.PolicyRef(line="t", version=self.version, digest=str(self.version))
        policy = LoadedPolicy(ref, model, TOKENIZER, DIALECT)
        config = EngineConfig(page_size=4, pages=1200, audit_every_step=True)
        engine = Engine(model, TOKENIZER, DIALECT, config, policy_version=self.version, sampler=sampler)
        self.made += map(weakref.ref, (model, engine, engine._pool))
        return Serving(policy, engine)

    @property
    def in_memory(self) -> int:
        return sum(reference() is not None for reference in self.made)


def cannot() -> Serving:
    raise MemoryError("no room for so many pages")


def tree_request(name: str, tree: Tree) -> MakeRequest:
    return lambda _: Request(name, tree.prompt, stream=True)


def asks(name: str, tokens: int = 3) -> MakeRequest:
    prompt = tuple(TOKENIZER.encode("a b", add_special_tokens=False))
    params = SamplingParams(temperature=1e6)  # nearly uniform, so that EOS is rare
    return lambda _: Request(name, prompt, params, Limits(max_tokens=tokens), Visibility.SEQUENTIAL)


@pytest.fixture
async def thread() -> AsyncIterator[EngineThread]:
    engine = EngineThread(torch_threads=1)
    engine.start()
    yield engine
    with contextlib.suppress(UnavailableError):  # a test may have stopped it
        await engine.stop()


@dataclass
class MidFork:
    """Four trajectories of policy 0 that are held in the step in which their branches are open."""

    old: Maker
    gate: Gate
    results: list[asyncio.Task[Result]]
    finished: list[str]


@pytest.fixture
async def mid_fork(thread: EngineThread) -> AsyncIterator[MidFork]:
    gate = Gate()
    old = Maker(0, [gate])
    await thread.replace(old)
    finished: list[str] = []
    results = [asyncio.create_task(told(thread, name, finished)) for name in TREES]
    assert await asyncio.to_thread(gate.reached.wait, LONG)
    yield MidFork(old, gate, results, finished)
    gate.opened.set()
    await asyncio.gather(*results, return_exceptions=True)


async def told(thread: EngineThread, name: str, finished: list[str]) -> Result:
    """Decode a tree; what was streamed is what the result holds."""
    streamed: list[int] = []
    async for event in thread.stream(tree_request(name, TREES[name])):
        if isinstance(event, TokensEvent):
            streamed += event.token_ids
        else:
            finished.append(name)
            assert sorted(streamed) == sorted(event.result.token_ids[event.result.prompt_length :])
            return event.result
    raise AssertionError("no result")


async def noted(thread: EngineThread, name: str, finished: list[str]) -> Result:
    result = await thread.decode(asks(name))
    finished.append(name)
    return result


async def sent(coroutine: Any) -> asyncio.Task[Any]:
    """A task that has put its command in the queue."""
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(0)
    return task


async def swap_mid_fork(
    thread: EngineThread, mid_fork: MidFork, new: Callable[[], Serving], in_flight: InFlight
) -> tuple[Swapped, list[Result], Result]:
    swap = await sent(thread.replace(new, in_flight))
    newcomer = await sent(noted(thread, "newcomer", mid_fork.finished))
    mid_fork.gate.opened.set()
    swapped = await swap
    return swapped, await asyncio.gather(*mid_fork.results), await newcomer


def check_trees(results: list[Result]) -> None:
    for result, tree in zip(results, TREES.values(), strict=True):
        assert (result.outcome, result.policy_version) == (Outcome.COMPLETED, 0)
        assert result.token_ids == tree.token_ids


async def check_settled(thread: EngineThread) -> None:
    """Nothing runs, no page is held, the books are right."""
    status, problems = await thread.status(audit=True)
    assert (status.running, status.waiting, status.pages_used, problems) == (0, 0, 0, ())
    assert thread.in_flight == 0


async def test_draining_finishes_what_is_decoded_and_newcomers_wait(thread: EngineThread, mid_fork: MidFork) -> None:
    swapped, before, after = await swap_mid_fork(thread, mid_fork, Maker(1), InFlight.DRAIN)
    assert (swapped.previous.version if swapped.previous else None, swapped.aborted) == (0, 0)
    check_trees(before)
    assert (after.policy_version, mid_fork.finished[-1]) == (1, "newcomer")
    assert mid_fork.old.in_memory == 0
    await check_settled(thread)


async def test_aborting_ends_every_branch_at_once(thread: EngineThread, mid_fork: MidFork) -> None:
    swapped, before, after = await swap_mid_fork(thread, mid_fork, Maker(1), InFlight.ABORT)
    assert swapped.aborted == len(TREES)
    for result in before:
        assert (result.outcome, result.policy_version) == (Outcome.ABORTED, 0)
        assert "Another policy" in result.message
    assert any(result.ledger.blocks for result in before)
    assert after.policy_version == 1
    assert mid_fork.old.in_memory == 0
    await check_settled(thread)


async def test_the_old_engine_finishes_beside_the_new_one(thread: EngineThread, mid_fork: MidFork) -> None:
    swapped, before, after = await swap_mid_fork(thread, mid_fork, Maker(1), InFlight.FINISH_ON_OLD)
    assert (swapped.previous.version if swapped.previous else None, swapped.aborted) == (0, 0)
    check_trees(before)
    assert (after.policy_version, mid_fork.finished[0]) == (1, "newcomer")
    await check_settled(thread)
    assert mid_fork.old.in_memory == 0
    status, _ = await thread.status()
    assert (status.joins, status.pages_total) == (3 * len(TREES), 1200)  # what the old one did is counted


async def test_one_swap_at_a_time(thread: EngineThread, mid_fork: MidFork) -> None:
    first = await sent(thread.replace(Maker(1)))
    others = [await sent(thread.replace(Maker(2), mode)) for mode in InFlight]
    mid_fork.gate.opened.set()
    assert (await first).aborted == 0
    for refused in await asyncio.gather(*others, return_exceptions=True):
        assert isinstance(refused, FailedPreconditionError)
        assert refused.reason == "SWAP_UNDER_WAY"
    check_trees(await asyncio.gather(*mid_fork.results))


async def test_a_caller_that_leaves_while_it_drains_changes_nothing(thread: EngineThread, mid_fork: MidFork) -> None:
    new = Maker(1)
    swap_task = await sent(thread.replace(new))
    newcomer = await sent(thread.decode(asks("newcomer")))
    swap_task.cancel()
    await asyncio.gather(swap_task, return_exceptions=True)
    mid_fork.gate.opened.set()
    assert (await newcomer).policy_version == 0
    check_trees(await asyncio.gather(*mid_fork.results))
    assert new.made == []
    assert (await thread.replace(new)).previous is not None


async def test_a_held_request_can_leave(thread: EngineThread, mid_fork: MidFork) -> None:
    swap_task = await sent(thread.replace(Maker(1)))
    newcomer = await sent(thread.decode(asks("newcomer")))
    newcomer.cancel()
    await asyncio.gather(newcomer, return_exceptions=True)
    mid_fork.gate.opened.set()
    await swap_task
    await check_settled(thread)


async def test_stopping_tells_those_who_swap_and_those_who_wait(mid_fork: MidFork, thread: EngineThread) -> None:
    swap_task = await sent(thread.replace(Maker(1)))
    newcomer = await sent(thread.decode(asks("newcomer")))
    stopping = await sent(thread.stop())
    mid_fork.gate.opened.set()
    await stopping
    for answer in await asyncio.gather(swap_task, newcomer, *mid_fork.results, return_exceptions=True):
        assert isinstance(answer, UnavailableError)


# --- without a thread, turn by turn ---


class Told:
    """A request and all that it was told."""

    def __init__(self, engines: Engines, make: MakeRequest) -> None:
        self.events: list[Any] = []
        self.submission = Submission(make, self.events.append, Future())
        engines.submit(self.submission)

    @property
    def result(self) -> Result:
        assert isinstance(self.events[-1], FinishedEvent), self.events
        return self.events[-1].result


@pytest.fixture
def health() -> list[bool]:
    return []


@pytest.fixture
def engines(health: list[bool]) -> Engines:
    return Engines(health.append)


def swap(engines: Engines, build: Callable[[], Serving], in_flight: InFlight = InFlight.DRAIN) -> Future[Swapped]:
    """Ask for a swap, and take one turn."""
    done: Future[Swapped] = Future()
    engines.request_swap(Swap(build, in_flight, done))
    engines.advance()
    return done


def drive(engines: Engines) -> None:
    for _ in range(1000):
        if not engines.busy:
            return
        engines.advance()
    raise AssertionError("the engines don't come to rest")


def version_of(engines: Engines) -> int | None:
    return engines.policy.version if engines.policy is not None else None


def test_an_old_engine_that_finishes_refuses_the_next_swap(engines: Engines) -> None:
    swap(engines, Maker(0))
    long = Told(engines, asks("long", 30))
    assert swap(engines, Maker(1), InFlight.FINISH_ON_OLD).result(0).aborted == 0
    for mode in InFlight:
        with pytest.raises(FailedPreconditionError, match="version 0 still finishes 1 requests"):
            swap(engines, Maker(2), mode).result(0)
    drive(engines)
    assert long.result.policy_version == 0
    previous = swap(engines, Maker(2)).result(0).previous
    assert previous is not None
    assert previous.version == 1


@pytest.mark.parametrize("mode", list(InFlight))
def test_a_policy_that_can_not_be_built_leaves_the_one_before_it(engines: Engines, mode: InFlight) -> None:
    swap(engines, Maker(0))
    first = Told(engines, asks("first", 30))
    done = swap(engines, cannot, mode)
    drive(engines)
    with pytest.raises(FailedPreconditionError, match="no room for so many pages"):
        done.result(0)
    second = Told(engines, asks("second"))
    drive(engines)
    assert second.result.policy_version == 0
    assert first.result.outcome is (Outcome.ABORTED if mode is InFlight.ABORT else Outcome.TRUNCATED)


@pytest.mark.parametrize("mode", list(InFlight))
def test_a_swap_of_an_idle_engine_is_done_at_once(engines: Engines, mode: InFlight) -> None:
    old = Maker(0)
    assert swap(engines, old, mode).result(0) == Swapped(None, 0)
    assert swap(engines, Maker(1), mode).result(0).aborted == 0
    assert (version_of(engines), old.in_memory, engines.busy) == (1, 0, False)


def test_a_refusal_that_is_not_told_yet_is_not_lost(engines: Engines) -> None:
    swap(engines, Maker(0))
    refused = Told(engines, asks("refused", 10**6))
    done = swap(engines, Maker(1))
    drive(engines)
    assert (refused.result.outcome, refused.result.policy_version) == (Outcome.REFUSED, 0)
    assert done.done()


def test_requests_that_wait_in_line_are_aborted_too(engines: Engines) -> None:
    swap(engines, Maker(0))
    told = [Told(engines, asks(str(i), 30)) for i in range(100)]  # 64 run at once
    engines.advance()
    assert swap(engines, Maker(1), InFlight.ABORT).result(0).aborted == 100
    assert {(t.result.outcome, t.result.policy_version) for t in told} == {(Outcome.ABORTED, 0)}


def test_a_withdrawn_request_of_the_old_engine_frees_it(engines: Engines) -> None:
    old = Maker(0)
    swap(engines, old)
    left = Told(engines, asks("left", 30))
    swap(engines, Maker(1), InFlight.FINISH_ON_OLD)
    engines.withdraw(left.submission)
    engines.advance()
    assert (old.in_memory, engines.busy, len(left.events)) == (0, False, 0)


def test_both_engines_are_counted_and_audited_while_they_run(engines: Engines) -> None:
    swap(engines, Maker(0))
    Told(engines, asks("old", 30))
    engines.advance()
    swap(engines, Maker(1), InFlight.FINISH_ON_OLD)
    Told(engines, asks("new", 30))
    engines.advance()
    status, problems = engines.status(audit=True)
    assert (status.running, status.pages_total, status.tokens, problems) == (2, 2400, 4, ())
    assert (status.pages_used, engines.in_flight) == (4, 2)


def test_equal_names_on_both_engines_are_two_requests(engines: Engines) -> None:
    swap(engines, Maker(0))
    one = Told(engines, asks("same", 30))
    swap(engines, Maker(1), InFlight.FINISH_ON_OLD)
    other = Told(engines, asks("same", 40))
    engines.withdraw(one.submission)
    drive(engines)
    assert one.events == []
    assert other.result.policy_version == 1
    assert other.result.ledger.total_tokens == 40


# --- faults ---


def is_fault(told: Told) -> bool:
    return len(told.events) == 1 and isinstance(told.events[0], InternalError) and "cosmic ray" in str(told.events[0])


def test_a_fault_of_the_old_engine_ends_its_own_requests(engines: Engines, health: list[bool]) -> None:
    old = Maker(0, [Breaks(4)])
    swap(engines, old)
    mine = Told(engines, asks("mine", 30))
    swap(engines, Maker(1), InFlight.FINISH_ON_OLD)
    other = Told(engines, asks("other", 30))
    drive(engines)
    assert is_fault(mine)
    assert other.result.policy_version == 1
    assert (engines.recoveries, health) == (0, [])


def test_a_fault_of_the_new_engine_leaves_the_old_one_to_finish(engines: Engines) -> None:
    swap(engines, Maker(0))
    old = Told(engines, asks("old", 30))
    swap(engines, Maker(1, [Breaks(4), None]), InFlight.FINISH_ON_OLD)
    new = Told(engines, asks("new", 30))
    drive(engines)
    assert is_fault(new)
    assert (old.result.policy_version, old.result.ledger.total_tokens) == (0, 30)
    assert (version_of(engines), engines.recoveries) == (1, 1)


def test_an_engine_that_failed_is_made_again(
    engines: Engines, health: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("npr_rollout.engines"), "disabled", True)  # pytest would keep the traceback
    maker = Maker(0, [Breaks(4), None])
    swap(engines, maker)
    told = [Told(engines, asks(str(i), 30)) for i in range(3)]
    drive(engines)
    assert all(map(is_fault, told))
    assert maker.in_memory == 3  # the new one's model, engine and pool
    again = Told(engines, asks("0", 30))
    drive(engines)
    assert again.result.policy_version == 0
    assert (engines.recoveries, health) == (1, [])
    status, problems = engines.status(audit=True)
    assert (status.pages_used, problems) == (0, ())


def test_a_second_fault_without_progress_leaves_it_down_until_a_policy_is_served(
    engines: Engines, health: list[bool]
) -> None:
    swap(engines, Maker(0, [Breaks(4)]))
    for name in "ab":
        assert health == []
        told = Told(engines, asks(name, 30))
        drive(engines)
        assert is_fault(told)
    assert (version_of(engines), health, engines.recoveries) == (None, [False], 1)
    refused = Told(engines, asks("c"))
    with pytest.raises(FailedPreconditionError, match=r"cosmic ray.*Serve one again"):
        refused.submission.accepted.result(0)
    assert swap(engines, Maker(1)).result(0) == Swapped(None, 0)
    assert health == [False, True]


def test_progress_earns_another_recovery(engines: Engines) -> None:
    swap(engines, Maker(0, [Breaks(PROGRESS_STEPS), Breaks(PROGRESS_STEPS), Breaks(PROGRESS_STEPS - 1)]))
    for recoveries in (1, 2):
        Told(engines, asks(str(recoveries), 2 * PROGRESS_STEPS))
        drive(engines)
        assert (version_of(engines), engines.recoveries) == (0, recoveries)
    Told(engines, asks("last", 2 * PROGRESS_STEPS))
    drive(engines)
    assert (version_of(engines), engines.recoveries) == (None, 2)


def test_a_fault_while_it_drains_lets_the_next_policy_in(engines: Engines) -> None:
    swap(engines, Maker(0, [Breaks(4)]))
    told = Told(engines, asks("a", 30))
    done = swap(engines, Maker(1))
    held = Told(engines, asks("b"))
    drive(engines)
    assert is_fault(told)
    assert done.result(0).aborted == 0
    assert held.result.policy_version == 1


async def test_what_a_command_raises_belongs_to_its_caller(thread: EngineThread) -> None:
    await thread.replace(Maker(0))
    with pytest.raises(ZeroDivisionError):
        await thread.between_steps(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await thread.decode(lambda _: Request(str(1 // 0), (1,)))
    assert (await thread.decode(asks("a"))).policy_version == 0
