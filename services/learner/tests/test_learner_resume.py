"""Crashes at every point of a step, and kill -9 of the process: nothing is lost, nothing is trained on twice.

The measure is always the same: weights and losses of the interrupted run equal, bit for bit, those of one that was
never interrupted.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from npr.learner.v1 import learner_pb2
from npr.types.v1 import policy_pb2
from npr_common.errors import NprError, UnavailableError
from npr_common.policy_store import PolicyStore
from npr_common.testing.processes import service_process
from npr_learner.checkpoint import CheckpointStore
from npr_learner.experience import Experience
from npr_learner.frontiers import Frontiers
from npr_learner.stages import Stages

FINE_TUNE = {
    "learning_rate": 3e-3,
    "epochs": 12,
    "tokens_per_update": 100,
    "checkpoint_every_steps": 4,
    "schedule": "cosine",
    "warmup_fraction": 0.1,
}
STEPS = 3


def weights_hash(rig: Any, ref: policy_pb2.PolicyRef) -> str:
    manifest = PolicyStore(rig.addresses.policy_store_url, rig.addresses.cache_dir).manifest(ref)
    return manifest.files["model.safetensors"]


def measured(result: learner_pb2.StepResult) -> dict[str, float]:
    return {name: value for name, value in result.metrics.items() if name != "seconds"}


async def job(rig: Any) -> list[tuple[str, dict[str, float]]]:
    """Fine-tunes and does three PAPO steps; every call may be repeated. Returns what is to be equal."""
    started = await rig.start("beta", "SFT", options_json=json.dumps(FINE_TUNE))
    group_ids = await rig.experience(started.policy, "beta")
    results = [(await rig.fine_tune("beta", group_ids))[-1].result]
    source = learner_pb2.ModelSource(policy=results[0].policy)
    await rig.start("npr", "PAPO", source=source)
    for step in range(STEPS):
        policy = policy_pb2.PolicyRef(line=rig.run_id, version=results[0].policy.version + 1 + step)
        group_ids = await rig.experience(policy, f"npr-{step}")
        results.append((await rig.train("npr", step, group_ids))[-1].result)
    return [(weights_hash(rig, result.policy), measured(result)) for result in results]


async def expected_of(rig: Any, new_rig: Callable[[], Any]) -> list[tuple[str, dict[str, float]]]:
    other = new_rig()
    async with other.running():
        outcome = await job(other)
        await require_all_consumed(other)
    return outcome


async def require_all_consumed(rig: Any) -> None:
    assert await rig.consumed_by() == {"beta/fine_tune": 3, **{f"npr/step/{step}": 3 for step in range(STEPS)}}


CRASHES: list[tuple[type, str]] = [
    (CheckpointStore, "begin"),
    (CheckpointStore, "finish"),
    (Stages, "publish"),
    (Experience, "acknowledge"),
    (Frontiers, "store_answer"),
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name"), CRASHES)
async def test_a_crash_at_any_point_of_a_step_changes_nothing(
    rig: Any, new_rig: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, *, owner: type, name: str, after: bool
) -> None:
    """Every third call of the named method dies, before it does its work or after it."""
    expected = await expected_of(rig, new_rig)
    whole, calls, crashes = getattr(owner, name), 0, 0

    def dies() -> bool:
        nonlocal calls, crashes
        calls += 1
        crashes += calls % 3 == 0
        return calls % 3 == 0

    def sometimes(*arguments: Any, **options: Any) -> Any:
        dying = dies()
        if dying and not after:
            raise RuntimeError("crash")
        result = whole(*arguments, **options)
        if dying:
            raise RuntimeError("crash")
        return result

    async def sometimes_async(*arguments: Any, **options: Any) -> Any:
        dying = dies()
        if dying and not after:
            raise RuntimeError("crash")
        await whole(*arguments, **options)
        if dying:
            raise RuntimeError("crash")

    monkeypatch.setattr(owner, name, sometimes_async if asyncio.iscoroutinefunction(whole) else sometimes)
    for _ in range(20):
        async with rig.running():  # a fresh process, as far as memory goes
            try:
                outcome = await job(rig)
            except NprError:
                continue
            await require_all_consumed(rig)
            break
    assert outcome == expected
    assert crashes >= 1


async def test_kill_9_at_any_moment_changes_nothing(rig: Any, new_rig: Callable[[], Any]) -> None:
    expected = await expected_of(rig, new_rig)
    environment = {
        "NPR_BUFFER_ADDRESS": rig.buffer_address,
        "NPR_POLICY_STORE_URL": rig.addresses.policy_store_url,
        "NPR_CACHE_DIR": str(rig.addresses.cache_dir),
        "NPR_LEARNER_TORCH_THREADS": "1",
        "NPR_LEARNER_DEVICE": "cpu",
    }
    outcome = None
    for life_seconds in (0.3, 0.8, None):
        with service_process("npr_learner", rig.folder, environment) as process:
            async with rig.connected(process.address):
                work = asyncio.create_task(job(rig))
                if life_seconds is None:
                    outcome = await work
                    await require_all_consumed(rig)
                else:
                    await asyncio.wait({work}, timeout=life_seconds)
                    process.kill()
                    with pytest.raises(UnavailableError):
                        await work
    assert outcome == expected
