"""Ending tasks for certain."""

import asyncio
from collections.abc import Iterable
from typing import Any

# redis-py can swallow a cancellation that arrives while it connects, so one `cancel` is not always enough.
_PATIENCE_SECONDS = 0.2


async def end(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels tasks until all are done; what they raised is dropped."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_PATIENCE_SECONDS)
