"""The supervisor's view of the stack: one state, written to its file at every change, that tasks can wait on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from npr_client.stack.layout import StateDir
from npr_client.stack.state import ComponentState, Phase, StackState, save_state
from npr_common.errors import ResourceExhaustedError

log = logging.getLogger(__name__)


class Board:
    """Single writer of the state file while the supervisor lives."""

    def __init__(self, state_dir: StateDir, state: StackState) -> None:
        self.state = state
        self._state_dir = state_dir
        self._changed = asyncio.Condition()

    async def replace(self, state: StackState) -> None:
        """Makes `state` the state, and writes it.

        On a full disk the stack lives on: the state is written at the next change, and a process that the file doesn't
        name is still found by its mark.
        """
        async with self._changed:
            self.state = state
            try:
                save_state(self._state_dir.state_file, state)
            except ResourceExhaustedError as error:
                log.warning("%s", error.message)
            self._changed.notify_all()

    async def update(self, name: str, **changes: Any) -> ComponentState:
        """Changes some fields of one component."""
        component = self.state.component(name).model_copy(update=changes)
        await self.replace(self.state.with_component(name, component))
        return component

    async def wait_running(self, names: Iterable[str]) -> None:
        """Returns when all of these are healthy by the board."""
        wanted = tuple(names)
        await self._wait(lambda state: all(state.component(name).phase is Phase.RUNNING for name in wanted))

    async def _wait(self, condition: Callable[[StackState], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: condition(self.state))
