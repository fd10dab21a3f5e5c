"""Threads that end with their work."""

import asyncio
import contextvars
import threading
from typing import NoReturn

import pytest

from npr_common.threads import in_own_thread

_said = contextvars.ContextVar("_said", default="nothing")


async def test_result_error_and_context_come_through() -> None:
    _said.set("hello")
    assert await in_own_thread(lambda end: _said.get() + end, "!") == "hello!"

    def fail() -> NoReturn:
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        await in_own_thread(fail)


async def test_the_thread_ends_with_the_function() -> None:
    thread = await in_own_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()


async def test_cancelling_returns_at_once_and_the_function_goes_on() -> None:
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait(30)
        ended.set()

    call = asyncio.create_task(in_own_thread(work))
    await asyncio.to_thread(begun.wait, 30)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not ended.is_set()
    release.set()
    assert await asyncio.to_thread(ended.wait, 30)
