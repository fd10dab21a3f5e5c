"""What loads and checks policies leaves no OpenMP threads behind, which would slow down those that decode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from npr_common.threads import in_own_thread

_TASKS = Path("/proc/self/task")

pytestmark = pytest.mark.skipif(not _TASKS.exists(), reason="threads are counted in /proc")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def multiply() -> float:
    square = torch.full((512, 512), 0.5)
    return float((square @ square).sum())


def native_threads() -> int:
    return len(list(_TASKS.iterdir()))


def fewer_than(count: int) -> bool:
    """An ended thread's OpenMP threads go a moment after it."""
    deadline = time.monotonic() + 30
    while native_threads() >= count and time.monotonic() < deadline:
        time.sleep(0.01)
    return native_threads() < count


async def test_a_thread_that_computed_takes_its_openmp_threads_with_it(two_threads: None) -> None:
    await in_own_thread(multiply)  # what is started once a process
    before = native_threads()
    for _ in range(4):
        await in_own_thread(multiply)
    assert await asyncio.to_thread(fewer_than, before + 4)


async def test_the_loop_s_own_pool_keeps_them(two_threads: None) -> None:
    """Why `in_own_thread` is there; if this fails, it may go."""
    await asyncio.to_thread(multiply)
    before = native_threads()
    await asyncio.gather(*(asyncio.to_thread(multiply) for _ in range(4)))
    assert native_threads() > before
