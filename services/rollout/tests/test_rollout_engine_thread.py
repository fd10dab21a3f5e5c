"""The engine's thread: faults are told, policies are replaced when idle, whoever waits gets an answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from npr.types.v1 import policy_pb2
from npr_common.dialects import load_dialect
from npr_common.errors import FailedPreconditionError, InternalError, InvalidArgumentError, UnavailableError
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.sampling import RandomSampler
from npr_rollout.engine_thread import EngineThread, MakeRequest, Serving
from npr_rollout.policy_loader import LoadedPolicy
from npr_rollout.record.outcomes import Outcome, Visibility
from npr_rollout.record.request import Limits, Request, SamplingParams
from npr_rollout.testing.models import tagged_tokenizer, tiny_model

TOKENIZER = tagged_tokenizer()
DIALECT = load_dialect("npr")


class BrokenSampler(RandomSampler):
    def sample(self, logits: Any, spans: Any) -> Any:
        raise RuntimeError("a cosmic ray")


def serving(version: int = 0, sampler: Any = None) -> Serving:
    model = tiny_model("qwen3", TOKENIZER, hidden=16, layers=1)
    policy = LoadedPolicy(policy_pb2.PolicyRef(line="t", version=version), model, TOKENIZER, DIALECT)
    return Serving(policy, Engine(model, TOKENIZER, DIALECT, EngineConfig(), policy_version=version, sampler=sampler))


def asks(name: str, tokens: int = 10) -> MakeRequest:
    prompt = tuple(TOKENIZER.encode("a b", add_special_tokens=False))
    params = SamplingParams(temperature=1e6)  # nearly uniform, so that EOS is rare
    return lambda _: Request(name, prompt, params, Limits(max_tokens=tokens), Visibility.SEQUENTIAL)


async def until_running(engine: EngineThread, count: int) -> None:
    status, _ = await engine.status()
    while status.running < count:
        status, _ = await engine.status()


@pytest.fixture
async def thread() -> AsyncIterator[EngineThread]:
    engine = EngineThread(torch_threads=1)
    engine.start()
    yield engine
    await engine.stop()


async def test_without_a_policy_nothing_is_decoded(thread: EngineThread) -> None:
    with pytest.raises(FailedPreconditionError):
        await thread.decode(asks("a"))


async def test_a_bad_request_is_its_senders_alone(thread: EngineThread) -> None:
    await thread.replace(serving)
    with pytest.raises(InvalidArgumentError):
        await thread.decode(lambda _: Request("a", ()))
    assert (await thread.decode(asks("b"))).policy_version == 0


async def test_a_fault_is_told_to_everyone_and_the_next_policy_is_served(thread: EngineThread) -> None:
    await thread.replace(lambda: serving(sampler=BrokenSampler()))
    answers = await asyncio.gather(*(thread.decode(asks(str(i))) for i in range(3)), return_exceptions=True)
    assert all(isinstance(answer, InternalError | FailedPreconditionError) for answer in answers)
    assert any(isinstance(answer, InternalError) and "cosmic ray" in answer.message for answer in answers)
    await thread.replace(lambda: serving(1))
    assert (await thread.decode(asks("again"))).policy_version == 1


async def test_a_policy_is_replaced_when_nothing_is_on_its_way(thread: EngineThread) -> None:
    await thread.replace(serving)
    before = [asyncio.create_task(thread.decode(asks(f"before{i}", 900))) for i in range(4)]
    await until_running(thread, 4)
    replacing = asyncio.create_task(thread.replace(lambda: serving(1)))
    await asyncio.sleep(0)
    after = asyncio.create_task(thread.decode(asks("after")))
    assert {result.policy_version for result in await asyncio.gather(*before)} == {0}
    await replacing
    assert (await after).policy_version == 1


async def test_a_policy_that_can_not_be_served_is_an_error_of_the_call(thread: EngineThread) -> None:
    def fail() -> Serving:
        raise FailedPreconditionError("sliding windows")

    with pytest.raises(FailedPreconditionError, match="sliding"):
        await thread.replace(fail)
    await thread.replace(serving)


async def test_cancelling_aborts(thread: EngineThread) -> None:
    await thread.replace(serving)
    task = asyncio.create_task(thread.decode(asks("a", 900)))
    await until_running(thread, 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    status, problems = await thread.status(audit=True)
    assert (status.running, status.pages_used, problems) == (0, 0, ())


async def test_an_end_reaches_the_request_it_is_of(thread: EngineThread) -> None:
    """A request may have the name of one that has just been given up."""
    await thread.replace(serving)
    for _ in range(5):
        first = asyncio.create_task(thread.decode(asks("same", tokens=500)))
        await until_running(thread, 1)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        result = await thread.decode(asks("same", tokens=3))
        assert result.outcome is not Outcome.ABORTED
        assert result.ledger.total_tokens <= 3
    status, problems = await thread.status(audit=True)
    assert (status.running, status.waiting, thread.in_flight, problems) == (0, 0, 0, ())


async def test_stopping_tells_those_who_wait() -> None:
    engine = EngineThread(torch_threads=1)
    engine.start()
    await engine.replace(serving)
    task = asyncio.create_task(engine.decode(asks("a", 900)))
    await until_running(engine, 1)
    await engine.stop()
    with pytest.raises(UnavailableError):
        await task
    with pytest.raises(UnavailableError):
        await engine.status()
