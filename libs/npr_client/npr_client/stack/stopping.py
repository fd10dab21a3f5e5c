"""Ends a stack's processes: whoever uses a component is gone before the component is told to go."""

from __future__ import annotations

import asyncio
import logging
import signal

from npr_client.stack.components import COMPONENTS, dependents
from npr_client.stack.processes import ProcessIdentity, marked_processes, wait_for_exit
from npr_client.stack.state import ComponentState, Phase, StackState

log = logging.getLogger(__name__)

DRAIN_SECONDS = 40.0
KILL_SECONDS = 10.0


async def stop_components(state: StackState) -> StackState:
    """SIGTERMs every living component in stopping order and waits; kills what does not drain in time.

    Returns the state with all components stopped. Addresses stay: the next start uses them again.
    """
    stopped = {name: asyncio.Event() for name in COMPONENTS}

    async def stop(name: str) -> None:
        for dependent in dependents(name):
            await stopped[dependent].wait()
        await _stop(name, state.component(name).process)
        stopped[name].set()

    async with asyncio.TaskGroup() as tasks:
        for name in COMPONENTS:
            tasks.create_task(stop(name))
    await _kill_marked(state.stack_id)
    return state.model_copy(update={"components": {name: _at_rest(c) for name, c in state.components.items()}})


async def _stop(name: str, process: ProcessIdentity | None) -> None:
    if process is None or not process.alive():
        return
    log.info("%s: draining process %d", name, process.pid)
    process.signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            await wait_for_exit(process)
    except TimeoutError:
        log.warning("%s: not drained after %.0f s; killing process %d", name, DRAIN_SECONDS, process.pid)
        await _kill(process)


async def _kill_marked(stack_id: str) -> None:
    """What a killed service left behind, or what was started just before its supervisor was killed."""
    for process in list(marked_processes(stack_id)):
        log.warning("killing leftover process %d", process.pid)
        await _kill(process)


async def _kill(process: ProcessIdentity) -> None:
    process.signal(signal.SIGKILL)
    async with asyncio.timeout(KILL_SECONDS):
        await wait_for_exit(process)


def _at_rest(component: ComponentState) -> ComponentState:
    changes = {"phase": Phase.STOPPED, "process": None, "restarts": 0, "failed_starts": 0, "last_error": ""}
    return component.model_copy(update=changes)
