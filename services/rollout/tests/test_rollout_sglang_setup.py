"""An SGLang server that can't be started: it is said at once, and of what, where that can be seen; else soon."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from npr.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from npr.types.v1 import prompt_pb2, sampling_pb2, trajectory_pb2
from npr_common.config import WRONG_SETTINGS_EXIT_CODE, WrongSettingsError
from npr_common.errors import NprError, rpc_errors
from npr_common.testing.servers import running_server
from npr_rollout.service import RolloutService
from npr_rollout.settings import BackendKind, RolloutSettings
from npr_rollout.sglang.backend import sized
from npr_rollout.sglang.server import check_setup
from npr_rollout.sglang.settings import SglangSettings
from npr_rollout.testing.calls import serve

NO_RETRIES = [("grpc.enable_retries", 0)]
ON_CPU = {"device": "cpu", "attention_backend": "torch_native"}


@pytest.fixture
def python() -> str:
    if "NPR_SGLANG_PYTHON" not in os.environ:
        pytest.skip("NPR_SGLANG_PYTHON names no Python with SGLang")
    return os.environ["NPR_SGLANG_PYTHON"]


@pytest.mark.parametrize(
    ("wrong", "why"), [("/no/such/python", "can't be run"), (sys.executable, "but none is installed")]
)
def test_a_python_without_sglang(wrong: str, why: str) -> None:
    with pytest.raises(WrongSettingsError, match=why) as told:
        check_setup(SglangSettings(python=wrong))
    assert set(told.value.variables) == {"NPR_SGLANG_PYTHON"}


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("NPR_SGLANG_DEVICE", "cpuu", "'cuda' or 'cpu'"),
        ("NPR_SGLANG_POOL_TOKENS", "4k", "valid integer"),
        ("NPR_SGLANG_POOL_TOKEN", "4096", "is no variable; NPR_SGLANG_POOL_TOKENS is"),
    ],
)
def test_variables_that_are_misspelt(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, why: str) -> None:
    monkeypatch.setenv("NPR_SGLANG_HOME", "/somewhere")  # the set-up script's
    SglangSettings.from_environment()
    monkeypatch.setenv(variable, value)
    with pytest.raises(WrongSettingsError, match=why) as told:
        SglangSettings.from_environment()
    assert set(told.value.variables) == {variable}


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("settings", "variable", "why"),
    [
        ({"attention_backend": "none_such"}, "ATTENTION_BACKEND", "none_such"),
        ({"dtype": "int3"}, "DTYPE", "int3"),
        ({"arguments": ["--none-such", "3"]}, "ARGUMENTS", "none-such"),
        ({"arguments": ["--schedule-policy", "none-such"]}, "ARGUMENTS", "schedule-policy"),
        ({"device": "cuda"}, "DEVICE", "no GPU"),
    ],
)
def test_settings_that_the_server_does_not_take(python: str, settings: dict[str, Any], variable: str, why: str) -> None:
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(WrongSettingsError, match=why) as told:
        check_setup(SglangSettings(**{"python": python, **ON_CPU, **settings}))
    assert set(told.value.variables) == {f"NPR_SGLANG_{variable}"}


@pytest.mark.sglang
@pytest.mark.parametrize("plugin", [True, False])
def test_settings_that_the_server_takes(python: str, plugin: bool) -> None:
    check_setup(SglangSettings(python=python, plugin=plugin, **ON_CPU))


def test_a_service_that_could_never_serve_does_not_start() -> None:
    settings = {"NPR_ROLLOUT_BACKEND": "sglang", "NPR_SGLANG_PYTHON": "/no/such/python"}
    command = [sys.executable, "-m", "npr_rollout"]
    ended = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == WRONG_SETTINGS_EXIT_CODE
    assert ended.stderr.splitlines()[-1].startswith("NPR_SGLANG_PYTHON: /no/such/python can't be run")


@pytest.mark.sglang
@pytest.mark.timeout(600)
async def test_a_server_that_ends_while_it_starts(
    python: str, peers: Any, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first starts may be an accident. Then a job that needs it is refused, with the reason, and not judged."""
    arguments = '["--schedule-policy", "dfs-weight"]'
    for name, value in {"DEVICE": "cpu", "ATTENTION_BACKEND": "torch_native", "ARGUMENTS": arguments}.items():
        monkeypatch.setenv(f"NPR_SGLANG_{name}", value)
    policy = publish("never-starts")
    service = RolloutService(RolloutSettings(backend=BackendKind.SGLANG, lease_wait_seconds=1.0), peers.addresses)
    async with running_server(service) as address, grpc.aio.insecure_channel(address, NO_RETRIES) as channel:
        stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
        with pytest.raises(NprError, match="dfs-weight"), rpc_errors():
            await serve(stub, policy)
        job = rollout_pb2.SubmitJobRequest(
            request_id=f"job-{uuid.uuid4().hex[:12]}",
            prompts=[prompt_pb2.Prompt(token_ids=[1, 2], gold="3", verifier="math")],
            samples_per_prompt=1,
            decoding=sampling_pb2.DecodingSpec(visibility=sampling_pb2.VISIBILITY_PARALLEL),
            policy=policy,
        )
        await stub.SubmitJob(job)
        found = []
        watched = stub.WatchJob(rollout_pb2.WatchJobRequest(job_id=job.request_id, with_trajectories=True))
        async for response in watched:
            found += response.trajectories
        status = await stub.GetEngineStatus(rollout_pb2.GetEngineStatusRequest())
    (scored,) = found
    assert scored.trajectory.outcome == trajectory_pb2.OUTCOME_REFUSED
    assert "dfs-weight" in scored.trajectory.message
    assert scored.score.verdict == trajectory_pb2.VERDICT_KIND_UNSCORABLE
    assert scored.score.reason == scored.trajectory.message
    assert status.backend == "sglang"
    assert "never-starts@0 can't be served" in status.condition


def test_a_pool_on_a_cpu_is_as_large_as_that_of_the_engine_in_the_process() -> None:
    config = SimpleNamespace(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    model: Any = SimpleNamespace(config=config, dtype=torch.float32)
    rollout = RolloutSettings(kv_memory_mib=1)
    assert sized(SglangSettings(device="cpu"), rollout, model).pool_tokens == (1 << 20) // (2 * 3 * 2 * 8 * 4)
    for chosen in (SglangSettings(), SglangSettings(device="cpu", pool_tokens=7)):
        assert sized(chosen, rollout, model) == chosen
