"""Keeps one component alive: adopts or starts it, waits until it is healthy, waits until it ends, starts it again.

A component that keeps failing is tried again for ever, more and more slowly; `npr status` shows its last error. One
whose settings are wrong is not: they are the supervisor's own environment, which `npr up` gives to a new supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from pathlib import Path

from npr_client.stack.board import Board
from npr_client.stack.components import COMPONENTS, Component, Launch
from npr_client.stack.layout import StateDir
from npr_client.stack.logs import last_line, rotate, size, wrong_settings
from npr_client.stack.probes import Health
from npr_client.stack.processes import (
    COMPONENT_VARIABLE,
    STACK_VARIABLE,
    ProcessIdentity,
    marked_processes,
    wait_for_exit,
)
from npr_client.stack.state import Phase
from npr_common.config import WRONG_SETTINGS_EXIT_CODE

log = logging.getLogger(__name__)

START_SECONDS = 300.0
PROBE_INTERVAL_SECONDS = 0.1
FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 10.0
# A component that lived this long was well: its next end is a new trouble.
STABLE_SECONDS = 30.0
# Five services can't share one metrics port; they export by OTEL_EXPORTER_OTLP_ENDPOINT.
ONE_PROCESS_ONLY = frozenset({"NPR_METRICS_PORT"})


class Keeper:
    """The supervisor's task for one component."""

    def __init__(self, component: Component, board: Board, state_dir: StateDir) -> None:
        self._component = component
        self._board = board
        self._state_dir = state_dir
        self._child: subprocess.Popen[bytes] | None = None
        self._log_begin = 0  # of what the child says

    @property
    def name(self) -> str:
        return self._component.name

    async def run(self) -> None:
        """Until cancelled, or until the settings turn out to be wrong; cancelling leaves the process alone."""
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            await self._board.wait_running(self._component.needs)
            identity = await self._adopt() or await self._start()
            if await self._becomes_healthy(identity):
                await wait_for_exit(identity)
            if identity.uptime_seconds > STABLE_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            if await self._record_end(identity) is Phase.WRONG_SETTINGS:
                return
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF_SECONDS)

    async def _adopt(self) -> ProcessIdentity | None:
        """The living process that an earlier supervisor started, when it talks to the right addresses."""
        state = self._board.state.component(self.name)
        if state.process is None or not state.process.alive():
            return None
        if dict(state.launched_with) == self._needed_addresses():
            log.info("%s: adopted process %d", self.name, state.process.pid)
            return state.process
        log.info("%s: process %d talks to addresses that are gone; starting another", self.name, state.process.pid)
        state.process.signal(signal.SIGTERM)
        await wait_for_exit(state.process)
        return None

    async def _start(self) -> ProcessIdentity:
        self._kill_strays()
        self._state_dir.address_file(self.name).unlink(missing_ok=True)
        launch = self._component.launch(self._state_dir, self._board.state.addresses)
        log_file = self._state_dir.log_file(self.name)
        rotate(log_file)
        self._log_begin = size(log_file)
        self._child = _spawn(launch, self._board.state.stack_id, self.name, log_file)
        identity = ProcessIdentity.of(self._child.pid)
        await self._board.update(
            self.name,
            phase=Phase.STARTING,
            process=identity,
            address=launch.address or self._recorded_address,
            launched_with=self._needed_addresses(),
        )
        log.info("%s: started process %d", self.name, identity.pid)
        return identity

    def _kill_strays(self) -> None:
        """Ends processes of this component that no record names: they may hold its port or its files."""
        for stray in marked_processes(self._board.state.stack_id, self.name):
            log.warning("%s: killing stray process %d", self.name, stray.pid)
            stray.signal(signal.SIGKILL)

    async def _becomes_healthy(self, identity: ProcessIdentity) -> bool:
        """Waits until the process serves; False when it ends first or takes too long (it is then killed)."""
        try:
            async with asyncio.timeout(START_SECONDS):
                address = await self._serving_address(identity)
        except TimeoutError:
            log.warning("%s: not healthy after %.0f s; killing process %d", self.name, START_SECONDS, identity.pid)
            identity.signal(signal.SIGKILL)
            return False
        if address is None:
            return False
        await self._board.update(self.name, phase=Phase.RUNNING, address=address, failed_starts=0, last_error="")
        log.info("%s: serves on %s", self.name, address)
        self._restart_misled(address)
        return True

    async def _serving_address(self, identity: ProcessIdentity) -> str | None:
        while identity.alive():
            address = self._component.address(self._state_dir, self._recorded_address)
            if address and await self._component.health(address) is Health.SERVING:
                return address
            await asyncio.sleep(PROBE_INTERVAL_SECONDS)
        return None

    def _restart_misled(self, address: str) -> None:
        """Its port may have been taken by a stranger: who knows the old address must learn the new one."""
        for name, state in self._board.state.components.items():
            if state.launched_with.get(self.name, address) != address and state.process is not None:
                log.info("%s: restarting, %s has moved to %s", name, self.name, address)
                state.process.signal(signal.SIGTERM)

    async def _record_end(self, identity: ProcessIdentity) -> Phase:
        """Writes down that and why the process ended; what is to follow."""
        await wait_for_exit(identity)
        code = self._child.wait() if self._child is not None and self._child.pid == identity.pid else None
        state = self._board.state.component(self.name)
        failed = state.phase is Phase.STARTING
        if wrong := self._wrong_settings(code):
            log.error("%s: %s", self.name, "; ".join(wrong))
            await self._board.update(
                self.name, phase=Phase.WRONG_SETTINGS, process=None, failed_starts=0, last_error="\n".join(wrong)
            )
            return Phase.WRONG_SETTINGS
        error = f"process {identity.pid} ended{_how(code)}"
        if code is None or code >= 0:  # a process that was killed had no last words
            error += f": {last_line(self._state_dir.log_file(self.name))}"
        log.warning("%s: %s", self.name, error)
        await self._board.update(
            self.name,
            phase=Phase.BACKING_OFF,
            process=None,
            restarts=state.restarts + 1,
            failed_starts=state.failed_starts + 1 if failed else 0,
            last_error=error,
        )
        return Phase.BACKING_OFF

    def _wrong_settings(self, code: int | None) -> list[str]:
        if code != WRONG_SETTINGS_EXIT_CODE:
            return []
        return wrong_settings(self._state_dir.log_file(self.name), self._log_begin)

    @property
    def _recorded_address(self) -> str | None:
        return self._board.state.component(self.name).address

    def _needed_addresses(self) -> dict[str, str]:
        addresses = self._board.state.addresses
        return {need: addresses[need] for need in self._component.needs}


def make_keeper(name: str, board: Board, state_dir: StateDir) -> Keeper:
    """The keeper of a registered component."""
    return Keeper(COMPONENTS[name], board, state_dir)


def _spawn(launch: Launch, stack_id: str, name: str, log_file: Path) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, so that no terminal's signal and no supervisor's end reaches it."""
    inherited = {key: value for key, value in os.environ.items() if key not in ONE_PROCESS_ONLY}
    environment = {**inherited, **launch.environment, STACK_VARIABLE: stack_id, COMPONENT_VARIABLE: name}
    with log_file.open("ab") as output:
        return subprocess.Popen(
            launch.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _how(code: int | None) -> str:
    if code is None:
        return ""
    return f" by signal {-code}" if code < 0 else f" with exit code {code}"
