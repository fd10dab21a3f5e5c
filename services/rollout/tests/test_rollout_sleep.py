"""Sleep gives the memory of an engine back, and ServePolicy takes it again; on each backend."""

from __future__ import annotations

import asyncio
import gc
import os
import uuid
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from npr.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from npr.types.v1 import trajectory_pb2
from npr_common.errors import DataLossError, FailedPreconditionError, UnavailableError
from npr_common.rpc import connect, rpc_errors
from npr_common.testing.servers import running_server
from npr_rollout.engine.engine import Engine
from npr_rollout.service import RolloutService
from npr_rollout.settings import BackendKind, RolloutSettings
from npr_rollout.sglang.server import ServedModel
from npr_rollout.sglang.transport import Transport
from npr_rollout.testing.calls import LONG, generate, greedy, mid_decode, prompt, serve
from npr_rollout.testing.models import tagged_tokenizer, tiny_model
from npr_rollout.testing.sglang_servers import OwnServers, settings_for, sglang_server

pytestmark = pytest.mark.timeout(600)
needs_sglang = [
    pytest.mark.sglang,
    pytest.mark.skipif("NPR_SGLANG_PYTHON" not in os.environ, reason="NPR_SGLANG_PYTHON names no Python with SGLang"),
]

DRAIN, ABORT = rollout_pb2.IN_FLIGHT_DRAIN, rollout_pb2.IN_FLIGHT_ABORT


@pytest.fixture(params=[BackendKind.TORCH, pytest.param(BackendKind.SGLANG, marks=needs_sglang)])
async def stub(
    request: pytest.FixtureRequest, memory: Memory, peers: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    for name, value in {"DEVICE": "cpu", "ATTENTION_BACKEND": "torch_native", "POOL_TOKENS": "4096"}.items():
        monkeypatch.setenv(f"NPR_SGLANG_{name}", value)
    async with service(peers, request.param) as found:
        yield found


@asynccontextmanager
async def service(peers: Any, backend: BackendKind) -> AsyncIterator[Any]:
    settings = RolloutSettings(backend=backend, device="cpu", kv_memory_mib=8, lease_wait_seconds=1.0)
    async with (
        running_server(RolloutService(settings, peers.addresses)) as address,
        connect(address) as channel,
    ):
        yield rollout_pb2_grpc.RolloutServiceStub(channel)


async def sleep(stub: Any, mode: int = DRAIN) -> int:
    """How many requests it has aborted."""
    with rpc_errors():
        answer: rollout_pb2.SleepResponse = await stub.Sleep(rollout_pb2.SleepRequest(in_flight=mode), timeout=LONG)
        return answer.aborted


async def is_asleep(stub: Any) -> bool:
    status = await stub.GetEngineStatus(rollout_pb2.GetEngineStatusRequest())
    return bool(status.asleep)


class Memory:
    """What takes memory: engines in this process, and servers beside it. Other tests' own are not counted."""

    def __init__(self) -> None:
        self._engines = weakref.WeakSet(_engines())
        self._servers = OwnServers()

    def is_held(self) -> bool:
        """Whether there is any that was not there at first."""
        gc.collect()
        own = [engine for engine in _engines() if engine not in self._engines]
        return bool(own) or bool(self._servers.running())


@pytest.fixture
def memory() -> Memory:
    """It looks before the service is made."""
    return Memory()


def _engines() -> list[Engine]:
    return [each for each in gc.get_objects() if type(each) is Engine]


async def test_it_sleeps_and_wakes(memory: Memory, stub: Any, publish: Any) -> None:
    first, second = publish("sleeper"), publish("sleeper", 1, seed=1)
    await serve(stub, first)
    before = await generate(stub)
    flying = await mid_decode(stub, 300)
    assert memory.is_held()
    assert await sleep(stub) == 0
    assert await is_asleep(stub)
    assert not memory.is_held()
    assert (await flying).outcome == trajectory_pb2.OUTCOME_TRUNCATED  # it was let finish
    assert await sleep(stub, ABORT) == 0  # it does already
    with pytest.raises(UnavailableError, match="sleeps"):
        await generate(stub)
    await serve(stub, first)
    assert not await is_asleep(stub)
    after = await generate(stub)
    assert list(after.token_ids) == list(before.token_ids)
    assert list(after.raw_log_probs) == pytest.approx(list(before.raw_log_probs), abs=1e-4)

    flying = await mid_decode(stub, 900)
    assert await sleep(stub, ABORT) == 1
    assert (await flying).outcome == trajectory_pb2.OUTCOME_ABORTED
    await serve(stub, second)
    assert (await generate(stub)).policy == second


@pytest.mark.parametrize("stub", [BackendKind.TORCH], indirect=True)
async def test_work_waits_for_an_engine_that_sleeps(memory: Memory, stub: Any, publish: Any) -> None:
    policy = publish("waits")
    await serve(stub, policy)
    await sleep(stub)
    job = rollout_pb2.SubmitJobRequest(
        request_id=f"job-{uuid.uuid4().hex[:12]}",
        prompts=[prompt("a b")],
        samples_per_prompt=2,
        decoding=greedy(20),
        policy=policy,
    )
    await stub.SubmitJob(job)
    watch = asyncio.create_task(until_completed(stub, job.request_id))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(watch), 3.0)  # several times as long as the worker waits for work
    assert await is_asleep(stub)
    assert not memory.is_held()
    await serve(stub, policy)
    async with asyncio.timeout(LONG):
        assert (await watch).trajectories == 2


async def until_completed(stub: Any, job_id: str) -> rollout_pb2.Job:
    async for response in stub.WatchJob(rollout_pb2.WatchJobRequest(job_id=job_id)):
        if response.job.state == rollout_pb2.JOB_STATE_COMPLETED:
            break
    job: rollout_pb2.Job = response.job
    return job


async def test_a_policy_that_can_not_be_served_does_not_wake_it(memory: Memory, stub: Any, publish: Any) -> None:
    good, wrong = publish("awake", seed=3), publish("nightmare", seed=1, canary_of=2)
    await serve(stub, good)
    await sleep(stub)
    with pytest.raises(DataLossError, match="canary"):
        await serve(stub, wrong)
    assert await is_asleep(stub)
    assert not memory.is_held()
    await serve(stub, good)
    assert (await generate(stub)).policy == good


@pytest.mark.parametrize("stub", [BackendKind.TORCH], indirect=True)
async def test_what_it_can_not_do_changes_nothing(stub: Any, publish: Any) -> None:
    policy = publish("insomniac")
    await serve(stub, policy)
    with pytest.raises(FailedPreconditionError, match="needs the memory"):
        await sleep(stub, rollout_pb2.IN_FLIGHT_FINISH_ON_OLD)
    assert (await generate(stub)).policy == policy


@pytest.fixture(scope="module")
def their_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transport]:
    """A server that others run; it is attached to by its address."""
    if "NPR_SGLANG_PYTHON" not in os.environ:
        pytest.skip("NPR_SGLANG_PYTHON names no Python with SGLang")
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model("qwen3", tagged_tokenizer(), 9, hidden=32, layers=2)
    model.generation_config.eos_token_id = tagged_tokenizer().eos_token_id
    model.save_pretrained(folder)
    tagged_tokenizer().save_pretrained(folder)
    served = ServedModel(folder, model.config.max_position_embeddings, "float32", "theirs")
    with sglang_server(served, settings_for(os.environ["NPR_SGLANG_PYTHON"], 4096)) as transport:
        yield transport


@pytest.mark.sglang
async def test_a_server_that_others_run_gives_back_its_memory_and_stays(
    their_server: Transport, peers: Any, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's memory stays where it is, but all that is asked of the server is the same.

    Also a service that comes to a server that sleeps wakes it: the server says that it does.
    """
    policy = publish("attached", seed=3)
    monkeypatch.setenv("NPR_SGLANG_URL", their_server.url)
    monkeypatch.setenv("NPR_SGLANG_MEMORY_SAVER", "true")
    async with service(peers, BackendKind.SGLANG) as stub:
        await serve(stub, policy)
        before = await generate(stub)
        for _ in range(2):
            await sleep(stub)
            assert their_server.ask(lambda client: client.weight_version()) == "asleep"
        await serve(stub, policy)
        after = await generate(stub)
        await sleep(stub)
    async with service(peers, BackendKind.SGLANG) as stub:
        await serve(stub, policy)
        later = await generate(stub)
    for trajectory in (after, later):
        assert list(trajectory.token_ids) == list(before.token_ids)
        assert list(trajectory.raw_log_probs) == pytest.approx(list(before.raw_log_probs), abs=1e-4)


@pytest.mark.sglang
async def test_without_its_memory_saver_it_can_not_sleep(
    their_server: Transport, peers: Any, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = publish("restless", seed=4)
    monkeypatch.setenv("NPR_SGLANG_URL", their_server.url)
    async with service(peers, BackendKind.SGLANG) as stub:
        await serve(stub, policy)
        flying = await mid_decode(stub, 300)
        with pytest.raises(FailedPreconditionError, match="--enable-memory-saver"):
            await sleep(stub, ABORT)
        assert (await flying).outcome == trajectory_pb2.OUTCOME_TRUNCATED
        assert (await generate(stub)).policy == policy


@pytest.mark.gpu
@pytest.mark.sglang
@pytest.mark.skipif(
    "NPR_SGLANG_PYTHON" not in os.environ or not torch.cuda.is_available(), reason="no GPU, or no Python with SGLang"
)
async def test_the_memory_of_a_gpu_is_free_while_its_server_sleeps(
    peers: Any, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of 2^22 tokens of 256 bytes."""
    policy = publish("gpu", seed=3)
    for name, value in {"DTYPE": "float32", "MEMORY_SAVER": "true", "POOL_TOKENS": str(1 << 22)}.items():
        monkeypatch.setenv(f"NPR_SGLANG_{name}", value)
    async with service(peers, BackendKind.SGLANG) as stub:
        await serve(stub, policy)
        before = await generate(stub)
        free, _ = torch.cuda.mem_get_info()
        await sleep(stub)
        assert torch.cuda.mem_get_info()[0] - free > 0.9 * (1 << 30)
        await serve(stub, policy)
        after = await generate(stub)
    assert list(after.token_ids) == list(before.token_ids)
    assert list(after.raw_log_probs) == pytest.approx(list(before.raw_log_probs), abs=1e-4)
