"""Threads for numerical work beside asyncio.

Invariant: a thread that computes ends with its work. OpenMP keeps a set of threads for each thread that ever computed,
and once there are more of them in a process than cores, all of them sleep at barriers rather than spin: a model of a
hundred million weights then decodes at half the speed. The event loop's own pool would keep such threads for ever.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_own_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread that ends with it; its result, or what it raised.

    A call that is cancelled returns at once; the function goes on to its end, as with `asyncio.to_thread`.
    """
    context = contextvars.copy_context()
    executor = ThreadPoolExecutor(1, thread_name_prefix=getattr(function, "__name__", "work"))
    try:
        return await asyncio.get_running_loop().run_in_executor(
            executor, lambda: context.run(function, *args, **kwargs)
        )
    finally:
        executor.shutdown(wait=False)
