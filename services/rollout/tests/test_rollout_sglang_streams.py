"""Streams of an SGLang server: an abort reaches each of them, and an error ends those that it is about."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import aiohttp
import pytest

from npr_rollout.record.outcomes import Outcome
from npr_rollout.record.request import FinishedEvent, Limits, Request
from npr_rollout.record.script import Script
from npr_rollout.sglang.transport import Transport
from npr_rollout.sglang.wire import Ask, End, Ended, Tokens
from npr_rollout.testing.conformance import GREEDY, POOL_TOKENS, SECONDS, TOKENIZER, check_idle, on_server
from npr_rollout.testing.trees import TreeMaker
from npr_sglang.contract import KEY, STATE_KEY, Block, Context, Params

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

MAKER = TreeMaker(TOKENIZER, 5)
LONG = 700


def ask(name: str, input_tokens: int = 20, max_tokens: int = LONG, context: Context | None = None) -> Ask:
    return ask_for(name, MAKER.words(input_tokens)[:input_tokens], max_tokens, context)


def ask_for(name: str, tokens: list[int], max_tokens: int = 1, context: Context | None = None) -> Ask:
    params = Params(context=context or Context())
    return Ask(name, tokens, max_tokens, (), GREEDY, params, at_once=True)


def begin(server: Transport, *asks: Ask) -> list[str]:
    """Begins streams together; their names."""
    server.begin(asks)
    return [each.name for each in asks]


def ends_of(server: Transport, names: Sequence[str], after: Callable[[], None] | None = None) -> list[End]:
    """How streams end. `after` is called once each has told its first token."""
    ends: dict[str, End] = {}
    begun: set[str] = set()
    while len(ends) < len(names):
        arrival = server.arrivals.get(timeout=SECONDS)
        begun.add(arrival.name)
        if isinstance(arrival, Ended):
            assert arrival.name not in ends
            ends[arrival.name] = arrival.end
        if after is not None and len(begun) == len(names):
            after()
            after = None
    return [ends[name] for name in names]


def test_an_abort_reaches_streams_that_decode(server: Transport) -> None:
    names = begin(server, *(ask(f"decode.{i}.") for i in range(3)))
    ends = ends_of(server, names, lambda: server.abort(names[:2]))
    assert ends == [End.ABORTED, End.ABORTED, End.LENGTH]


def test_an_abort_reaches_streams_that_have_just_been_begun(server: Transport) -> None:
    """It waits until the server knows them: one that comes before is not heeded."""
    for turn in range(20):
        names = begin(server, *(ask(f"race{turn}.{i}.") for i in range(2)))
        server.abort(names)
        assert ends_of(server, names) == [End.ABORTED, End.ABORTED]


def test_one_of_a_batch_can_be_refused_alone(server: Transport) -> None:
    unsound = Context((Block(5, (100,)),))
    names = begin(server, ask("sound.", max_tokens=5), ask("unsound.", max_tokens=5, context=unsound))
    assert ends_of(server, names) == [End.LENGTH, End.REFUSED]


@pytest.mark.parametrize(
    ("sampling", "params", "others", "why"),
    [
        ({}, Params(script=(len(TOKENIZER),)), {}, "beyond the"),
        ({"max_new_tokens": 0}, Params(seal=True), {}, "seal needs"),
        ({"n": 2}, Params(seal=True), {}, "seal needs"),
        (
            {},
            Params(Context((Block(4, (3, 3)),))),
            {"return_logprob": True, "logprob_start_len": 5},
            "lies in the context",
        ),
    ],
)
async def test_what_the_server_can_not_do_is_refused(
    server: Transport, sampling: dict[str, Any], params: Params, others: dict[str, Any], why: str
) -> None:
    body = {
        "input_ids": MAKER.words(20)[:20],
        "sampling_params": {"max_new_tokens": 3, "custom_params": {KEY: params.to_dict()}, **sampling},
        **others,
    }
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
        session.post(f"{server.url}/generate", json=body) as response,
    ):
        assert response.status == HTTPStatus.BAD_REQUEST
        assert why in await response.text()


def test_a_batch_that_is_refused_as_a_whole_ends_as_a_whole(server: Transport) -> None:
    names = begin(server, ask("short.", max_tokens=5), ask("long.", input_tokens=POOL_TOKENS + 100))
    assert ends_of(server, names) == [End.REFUSED, End.REFUSED]
    assert ends_of(server, begin(server, ask("next.", max_tokens=5))) == [End.LENGTH]


def test_streams_that_may_say_more_than_fits_decode_together(server: Transport) -> None:
    """As the branches of a block do, which share one budget. One that waits would see the first ones end by length."""
    names = begin(server, *(ask(f"together.{i}.") for i in range(8)))
    assert len(names) * LONG > 1.5 * POOL_TOKENS
    assert set(ends_of(server, names, lambda: server.abort(names))) == {End.ABORTED}


def test_an_abort_reaches_streams_that_are_retracted_at_that_moment(server: Transport) -> None:
    """They wait for a place with their abort pending, and what they stand on is not theirs any more."""
    trunk, *branches = (MAKER.words(8)[:8] for _ in range(3))
    seals = begin(server, *(ask_for(f"branch{index}.", trunk + branch) for index, branch in enumerate(branches)))
    assert ends_of(server, seals) == [End.LENGTH, End.LENGTH]
    context = Context((Block(len(trunk), (len(branches[0]), len(branches[1]))),))
    retractions = turn = 0
    while not retractions:
        turn += 1
        assert turn < 100
        first = f"full{turn}."  # the server aborts all whose names begin so, by one message
        own = [sum(branches, trunk) + MAKER.words(2) for _ in range(24)]
        server.begin([ask_for(f"{first}{index or ''}", tokens, LONG, context) for index, tokens in enumerate(own)])
        told, ended = 0, []
        while len(ended) < len(own):
            arrival = server.arrivals.get(timeout=SECONDS)
            if isinstance(arrival, Ended):
                ended.append(arrival)
            elif told <= POOL_TOKENS - 100 + 20 * (turn % 16) < told + len(arrival.drawn):
                server.abort([first])
            told += 0 if isinstance(arrival, Ended) else len(arrival.drawn)
        assert {each.end for each in ended} <= {End.ABORTED, End.BROKEN}
        retractions = sum(each.retractions for each in ended)
    check_idle(on_server(server)({}))


def test_the_branches_of_a_fork_look_for_their_context_once(server: Transport) -> None:
    before = counters(server)
    tree = MAKER.lengthen(MAKER.tree(blocks=2, branches=4, longest=1), words=20)
    engine = on_server(server)({"tree": Script.of(tree.token_ids, tree.prompt_length, MAKER.tags)})
    engine.submit(Request("tree", tree.prompt, GREEDY, Limits(max_tokens=len(tree.token_ids))))
    while not engine.idle:
        engine.step()
    check_idle(engine)
    grown = {name: value - before[name] for name, value in counters(server).items()}
    assert grown["stitches"] == 6  # two joins, and the branches of the second block
    assert grown["look_ups"] == 3


def counters(server: Transport) -> dict[str, int]:
    """The plug-in's."""
    told: dict[str, int] = server.ask(lambda client: client.info())[STATE_KEY]
    return told


@pytest.mark.parametrize("by", ["abort", "deadline"])
def test_the_end_of_a_trajectory_ends_its_streams(server: Transport, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a block of long branches: what the server decodes for nobody takes room from all others."""
    arrivals = Arrivals()
    monkeypatch.setattr(server, "arrivals", arrivals)
    tree = MAKER.lengthen(MAKER.tree(blocks=1, branches=4, longest=1), words=LONG // 2)
    engine = on_server(server)({by: Script.of(tree.token_ids, tree.prompt_length, MAKER.tags)})
    deadline = time.monotonic() + 1.0 if by == "deadline" else None
    engine.submit(Request(by, tree.prompt, GREEDY, Limits(max_tokens=len(tree.token_ids)), deadline=deadline))
    results = []
    while not results:
        results += [event.result for event in engine.step() if isinstance(event, FinishedEvent)]
        if by == "abort" and engine.status().forks:
            engine.abort(by)
    assert engine.status().forks == 1
    assert results[0].outcome is (Outcome.ABORTED if by == "abort" else Outcome.DEADLINE)
    assert arrivals.wait_for_ends(5) == [End.STOPPED, *4 * [End.ABORTED]]  # the trunk, and its branches
    check_idle(engine)


class Arrivals(queue.SimpleQueue[Tokens | Ended]):
    """Arrivals that remember how streams have ended, whoever takes them."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: list[End] = []
        self._changed = threading.Condition()

    def put(self, item: Tokens | Ended, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        if isinstance(item, Ended):
            with self._changed:
                self._ends.append(item.end)
                self._changed.notify()

    def wait_for_ends(self, count: int) -> list[End]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._ends) >= count, SECONDS)
            return list(self._ends)
