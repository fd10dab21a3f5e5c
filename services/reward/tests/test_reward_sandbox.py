"""The sandbox: deadlines, limits, deaths, cancellation, and processes that outlive nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from npr.reward.v1 import reward_pb2, reward_pb2_grpc
from npr_common.errors import ResourceExhaustedError
from npr_common.rpc.client import connect
from npr_common.testing.processes import ServiceProcess, service_process
from npr_reward.sandbox import Job, Limits, SandboxPool
from npr_reward.verdict import VerdictKind
from npr_reward.verifiers import BUILT_IN

HOSTILE = "hostile_verifiers:HostileVerifier"


@pytest.fixture(autouse=True)
def importable_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandbox processes inherit this path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@asynccontextmanager
async def running_pool(
    *, size: int = 1, deadline_seconds: float = 30.0, max_waiting: int = 64
) -> AsyncIterator[SandboxPool]:
    limits = Limits(deadline_seconds=deadline_seconds, memory_mib=400)
    pool = SandboxPool(size=size, limits=limits, max_waiting=max_waiting, verifier_paths=(*BUILT_IN, HOSTILE))
    await pool.start()
    try:
        yield pool
    finally:
        pool.close()


def job(answer: str) -> Job:
    return Job.of("hostile", answer, "", {})


async def until(condition: Callable[[], bool], whom: str) -> None:
    """Waits for a condition that has no event to wait for."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited 60 s for {whom}"
        await asyncio.sleep(0.01)


def lives(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_an_endless_loop_costs_two_deadlines_and_is_unscorable() -> None:
    async with running_pool(deadline_seconds=0.5) as pool:
        started = time.monotonic()
        verdict = await pool.judge(job("loop"))
        assert 1.0 <= time.monotonic() - started < 5.0
        assert verdict.kind is VerdictKind.UNSCORABLE
        assert "0.5 s" in verdict.reason
        assert (await pool.judge(job("fine"))).kind is VerdictKind.CORRECT


@pytest.mark.parametrize("answer", ["memory", "raise", "exit"])
async def test_a_process_that_ends_without_a_verdict_is_replaced(answer: str) -> None:
    async with running_pool() as pool:
        (first,) = pool.pids
        assert (await pool.judge(job(answer))).kind is VerdictKind.UNSCORABLE
        verdict = await pool.judge(job("fine"))
        assert verdict.kind is VerdictKind.CORRECT
        assert verdict.reason == str(pool.pids[0]) != str(first)


async def test_a_memory_bomb_stays_below_its_limit() -> None:
    async with running_pool() as pool:
        bomb = asyncio.create_task(pool.judge(job("memory")))
        peak_kib = 0
        while not bomb.done():
            peak_kib = max([peak_kib, *map(resident_kib, pool.pids)])
            await asyncio.sleep(0)
        assert (await bomb).kind is VerdictKind.UNSCORABLE
        assert 0 < peak_kib < 400 * 1024


def resident_kib(pid: int) -> int:
    """Resident memory of a process; 0 once it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


async def test_kill_9_in_the_middle_of_a_job_only_costs_an_attempt(tmp_path: Path) -> None:
    marker = tmp_path / "begun"
    async with running_pool() as pool:
        verdict = asyncio.create_task(pool.judge(job(f"loop-once {marker}")))
        await until(marker.exists, "the job to begin")
        (victim,) = pool.pids
        os.kill(victim, signal.SIGKILL)
        assert (await verdict).kind is VerdictKind.CORRECT
        assert pool.pids != (victim,)


async def test_kill_9_of_idle_processes_costs_no_verdict() -> None:
    async with running_pool(size=2) as pool:
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        verdicts = await asyncio.gather(*(pool.judge(job(f"fine {index}")) for index in range(8)))
        assert {verdict.kind for verdict in verdicts} == {VerdictKind.CORRECT}


async def test_a_cancelled_caller_stops_its_process_and_frees_the_worker(tmp_path: Path) -> None:
    marker = tmp_path / "begun"
    async with running_pool() as pool:
        hung = asyncio.create_task(pool.judge(job(f"loop-once {marker}")))
        await until(marker.exists, "the job to begin")
        (pid,) = pool.pids
        hung.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hung
        await until(lambda: not lives(pid), "the process to end")
        assert (await pool.judge(job("fine"))).kind is VerdictKind.CORRECT


async def test_workers_judge_side_by_side(tmp_path: Path) -> None:
    async with running_pool(size=2, deadline_seconds=60) as pool:
        hung = asyncio.create_task(pool.judge(job(f"loop-once {tmp_path / 'begun'}")))
        await until((tmp_path / "begun").exists, "the job to begin")
        verdicts = await asyncio.gather(*(pool.judge(job(f"fine {index}")) for index in range(20)))
        assert not hung.done()
        assert {verdict.kind for verdict in verdicts} == {VerdictKind.CORRECT}
        hung.cancel()


async def test_admission_is_bounded_and_places_come_back() -> None:
    async with running_pool(max_waiting=4) as pool:
        with pool.admitted(3):
            with pytest.raises(ResourceExhaustedError) as refusal, pool.admitted(2):
                pass
            assert refusal.value.retry_after_seconds is not None
            assert refusal.value.retry_after_seconds > 0
            assert pool.waiting == 3
        with pool.admitted(4):
            assert pool.waiting == 4
        await asyncio.wait_for(pool.emptied(), timeout=1)


def children(pid: int) -> list[int]:
    """Processes that any thread of a process has started."""
    return [
        int(child) for listing in Path(f"/proc/{pid}/task").glob("*/children") for child in listing.read_text().split()
    ]


def descendants(pid: int) -> list[int]:
    return [found for child in children(pid) for found in (child, *descendants(child))]


@pytest.fixture
def reward_process(tmp_path: Path) -> Iterator[ServiceProcess]:
    """A reward service in a process of its own, with its family of four."""
    environment = {
        "NPR_REWARD_WORKERS": "2",
        "NPR_REWARD_EXTRA_VERIFIERS": f'["{HOSTILE}"]',
        "PYTHONPATH": str(Path(__file__).parent),
    }
    with service_process("npr_reward", tmp_path, environment) as process:
        # the fork server, multiprocessing's resource tracker and two workers
        assert len(descendants(process.pid)) == 4
        yield process


async def test_no_process_outlives_a_killed_service_not_even_a_busy_one(
    reward_process: ServiceProcess, tmp_path: Path
) -> None:
    marker = tmp_path / "begun"
    item = reward_pb2.ScoreItem(response_text=f"\\boxed{{loop-once {marker}}}", verifier="hostile")
    async with connect(reward_process.address) as channel:
        call = reward_pb2_grpc.RewardServiceStub(channel).Score(reward_pb2.ScoreRequest(items=[item]))
        await until(marker.exists, "the job to begin")
        family = descendants(reward_process.pid)
        reward_process.kill()
        await until(lambda: not any(map(lives, family)), "the sandbox to end")
        call.cancel()


async def test_sigterm_ends_the_service_and_its_sandbox(reward_process: ServiceProcess) -> None:
    family = descendants(reward_process.pid)
    assert await asyncio.to_thread(reward_process.stop) == 0
    await until(lambda: not any(map(lives, family)), "the sandbox to end")


def test_cpu_time_is_limited_even_without_the_service() -> None:
    code = "from npr_reward.sandbox import Limits; one = Limits(0.1, 400); one.confine(); one.grant_cpu()\nwhile 1: 0"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == -signal.SIGXCPU
