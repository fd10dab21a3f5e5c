"""The service on an SGLang server, by each way that weights get into it: swaps, wrong policies, a server that dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import npr_rollout.metrics
from npr.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from npr.types.v1 import policy_pb2, trajectory_pb2
from npr_common.errors import DataLossError, UnavailableError
from npr_common.rpc import connect
from npr_common.testing.servers import running_server
from npr_rollout.service import RolloutService
from npr_rollout.settings import BackendKind, RolloutSettings
from npr_rollout.sglang import client, weights
from npr_rollout.sglang.client import SglangClient
from npr_rollout.testing.calls import check_sound, generate, mid_decode, serve
from npr_rollout.testing.models import tagged_tokenizer, tiny_model
from npr_rollout.testing.sglang_servers import OwnServers

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

MidLoad = Callable[[Callable[[psutil.Process], None]], list[psutil.Process]]
SETTINGS = {"DEVICE": "cpu", "ATTENTION_BACKEND": "torch_native", "POOL_TOKENS": "4096"}


@pytest.fixture(scope="module", params=list(weights.WeightWay))
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def metrics(way: str) -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture(scope="module")
def servers(way: str) -> OwnServers:
    """It looks before the service is made."""
    return OwnServers()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(
    peers: Any, way: str, servers: OwnServers, metrics: InMemoryMetricReader, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[str]:
    """A service that the tests of a way share; each serves policies of its own."""
    if "NPR_SGLANG_PYTHON" not in os.environ:
        pytest.skip("NPR_SGLANG_PYTHON names no Python with SGLang")
    addresses = peers.addresses.model_copy(update={"cache_dir": tmp_path_factory.mktemp("cache")})
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (SETTINGS | {"WEIGHTS": way}).items():
            environment.setenv(f"NPR_SGLANG_{name}", value)
        settings = RolloutSettings(backend=BackendKind.SGLANG, lease_wait_seconds=1.0)
        meter = MeterProvider([metrics]).get_meter("npr")
        environment.setattr(npr_rollout.metrics, "meter", lambda: meter)
        service = RolloutService(settings, addresses)
        async with running_server(service) as address:
            yield address


@pytest_asyncio.fixture(loop_scope="module")
async def stub(address: str) -> AsyncIterator[Any]:
    async with connect(address) as channel:
        yield rollout_pb2_grpc.RolloutServiceStub(channel)


@pytest_asyncio.fixture(loop_scope="module")
async def impatient(address: str) -> AsyncIterator[Any]:
    """One that does not ask again when the service is unavailable."""
    async with grpc.aio.insecure_channel(address, [("grpc.enable_retries", 0)]) as channel:
        yield rollout_pb2_grpc.RolloutServiceStub(channel)


def check(trajectory: trajectory_pb2.Trajectory, policy: policy_pb2.PolicyRef, seed: int) -> None:
    """It is of this policy, and each of its tokens is as probable as the model of this seed says."""
    assert trajectory.policy == policy
    model = tiny_model("qwen3", tagged_tokenizer(), seed, hidden=32, layers=2)
    tokens = torch.tensor(list(trajectory.token_ids))
    with torch.no_grad():
        log_probs = model(input_ids=tokens[None]).logits[0].log_softmax(dim=-1)
    begin = trajectory.prompt_length
    assert len(tokens) > begin
    said = torch.tensor(list(trajectory.raw_log_probs))[-len(tokens) + begin :]
    expected = log_probs[begin - 1 : -1].gather(-1, tokens[begin:, None])[:, 0]
    torch.testing.assert_close(said, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", [rollout_pb2.IN_FLIGHT_DRAIN, rollout_pb2.IN_FLIGHT_ABORT])
async def test_a_swap_with_requests_in_flight(stub: Any, publish: Any, way: str, mode: int) -> None:
    line = f"flies-{way}-{mode}"
    first, second, third = (publish(line, version, seed=version) for version in range(3))
    await serve(stub, first)
    flying = await mid_decode(stub, 400)
    aborts = mode == rollout_pb2.IN_FLIGHT_ABORT
    assert (await serve(stub, second, mode)).aborted == (1 if aborts else 0)
    flown = await flying
    check(flown, first, 0)
    assert (flown.outcome == trajectory_pb2.OUTCOME_ABORTED) == aborts
    check(await generate(stub), second, 1)
    await serve(stub, third, mode)
    check(await generate(stub), third, 2)
    await serve(stub, first, mode)
    check(await generate(stub), first, 0)
    await check_sound(stub)


async def test_what_the_server_says_of_itself_is_measured(
    stub: Any, publish: Any, way: str, metrics: InMemoryMetricReader
) -> None:
    await serve(stub, publish(f"measured-{way}", seed=6))
    before = await asyncio.to_thread(collect, metrics)
    await generate(stub, 100)
    await generate(stub, 100)
    measured = await asyncio.to_thread(collect, metrics)
    assert measured["npr.engine.tokens", ""] - before["npr.engine.tokens", ""] == 200
    fed = {cached: grown("npr.engine.input_tokens", cached, before, measured) for cached in ("True", "False")}
    prompt = (await generate(stub, 1)).prompt_length
    assert fed["True"] + fed["False"] == 2 * prompt
    assert fed["True"] >= prompt - 1  # the second time it was there, but for the token that is computed again
    assert measured["npr.engine.server", "tokens_per_second"] > 0
    assert measured["npr.engine.server", "pool_tokens"] == 4096
    assert measured["npr.engine.server", "free_tokens"] < 4096
    for name in ("pins", "stitches", "evicted", "sealed", "waiting"):
        assert measured["npr.engine.server", name] >= 0


def collect(metrics: InMemoryMetricReader) -> dict[tuple[str, str], float]:
    """What is measured now, by the instrument and its attribute."""
    data = metrics.get_metrics_data()
    assert data is not None
    found = [each for resource in data.resource_metrics for scope in resource.scope_metrics for each in scope.metrics]
    return {
        (each.name, ",".join(str(value) for value in (point.attributes or {}).values())): point.value  # type: ignore[union-attr]
        for each in found
        for point in each.data.data_points
    }


def grown(
    name: str, attribute: str, before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]
) -> float:
    return after[name, attribute] - before.get((name, attribute), 0)


async def test_wrong_tensors_are_not_served(stub: Any, publish: Any, way: str) -> None:
    """Also not when they are in the server already, as after the first try."""
    good, wrong = publish(f"good-{way}", seed=3), publish(f"wrong-{way}", seed=1, canary_of=2)
    await serve(stub, good)
    for _ in range(2):
        with pytest.raises(DataLossError, match="fails its canary forward"):
            await serve(stub, wrong)
        check(await generate(stub), good, 3)
    await check_sound(stub)


async def test_a_server_that_dies_while_it_loads(
    stub: Any, impatient: Any, publish: Any, way: str, mid_load: MidLoad
) -> None:
    """Whoever asked is told; what was served is served again, by another server, and then the next policy is."""
    first, second = (publish(f"dies-{way}", version, seed=version + 4) for version in range(2))
    await serve(stub, first)
    killed = mid_load(psutil.Process.kill)
    with pytest.raises(UnavailableError):
        await serve(impatient, second)
    assert len(killed) == 1
    check(await generate(stub), first, 4)
    await serve(stub, second)
    check(await generate(stub), second, 5)
    await check_sound(stub)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CONTROL_SECONDS", "_INFO_SECONDS"):
        monkeypatch.setattr(client, name, 8.0)


@pytest.mark.usefixtures("short_waits")
async def test_a_server_that_stops_to_answer_while_it_loads(
    stub: Any, impatient: Any, publish: Any, way: str, mid_load: MidLoad
) -> None:
    """It lives, but nobody can wait for it: it is ended, and another one is started."""
    if way != "group":
        pytest.skip("the other ways have no half of this process that would wait too")
    first, second = (publish("stops", version, seed=version + 7) for version in range(2))
    await serve(stub, first)
    stopped = mid_load(psutil.Process.suspend)
    with pytest.raises(UnavailableError, match="does not answer"):
        await serve(impatient, second)
    assert not stopped[0].is_running()
    check(await generate(stub), first, 7)
    await serve(stub, second)
    check(await generate(stub), second, 8)
    await check_sound(stub)


@pytest.fixture
def mid_load(servers: OwnServers, monkeypatch: pytest.MonkeyPatch) -> MidLoad:
    """Has something happen, once, to the process with the weights; it comes to the list that is returned.

    It happens when some of a policy's tensors are in the server; from disk, when none is."""
    struck: list[psutil.Process] = []
    read, load = weights.read_parts, SglangClient.load

    def arrange(happens: Callable[[psutil.Process], None]) -> list[psutil.Process]:
        def strike() -> None:
            if not struck:
                struck.append(scheduler(servers))
                happens(struck[0])

        def read_parts(folder: Path, part_bytes: int) -> Iterator[weights.Part]:
            for count, part in enumerate(read(folder, 8 << 10)):
                if count == 2:
                    strike()
                yield part

        async def load_from_disk(wire: SglangClient, folder: str) -> None:
            strike()
            await load(wire, folder)

        monkeypatch.setattr(weights, "read_parts", read_parts)
        monkeypatch.setattr(SglangClient, "load", load_from_disk)
        return struck

    return arrange


def scheduler(servers: OwnServers) -> psutil.Process:
    """The process with the weights; another one answers HTTP, and has to find out what becomes of it."""
    (server,) = servers.running()
    (found,) = (child for child in psutil.Process(server).children(recursive=True) if "scheduler" in child.name())
    return found
