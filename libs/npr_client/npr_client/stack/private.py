"""One service for the length of a block: what a command starts for itself when no stack runs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from npr_client.stack.components import COMPONENTS, Component
from npr_client.stack.layout import StateDir
from npr_client.stack.logs import last_line
from npr_client.stack.probes import Health
from npr_common.errors import DeadlineExceededError, FailedPreconditionError

START_SECONDS = 120.0
STOP_SECONDS = 20.0
PROBE_INTERVAL_SECONDS = 0.05


@asynccontextmanager
async def private_service(name: str) -> AsyncIterator[str]:
    """Starts a service that needs no other, yields its address, and stops it.

    Raises:
        FailedPreconditionError: it ends before it serves; the message has its last words.
        DeadlineExceededError: it does not serve in time.
    """
    component = COMPONENTS[name]
    with tempfile.TemporaryDirectory(prefix=f"npr-{name}-") as folder:
        state_dir = StateDir(Path(folder))
        state_dir.create()
        process = _spawn(component, state_dir)
        try:
            yield await _serving_address(component, state_dir, process)
        finally:
            await asyncio.to_thread(_stop, process)


def _spawn(component: Component, state_dir: StateDir) -> subprocess.Popen[bytes]:
    launch = component.launch(state_dir, {})
    with state_dir.log_file(component.name).open("ab") as output:
        return subprocess.Popen(
            launch.command,
            env={**os.environ, **launch.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is the command's own business
        )


async def _serving_address(component: Component, state_dir: StateDir, process: subprocess.Popen[bytes]) -> str:
    try:
        async with asyncio.timeout(START_SECONDS):
            while process.poll() is None:
                address = component.address(state_dir, None)
                if address and await component.health(address) is Health.SERVING:
                    return address
                await asyncio.sleep(PROBE_INTERVAL_SECONDS)
    except TimeoutError as error:
        raise DeadlineExceededError(f"{component.name} does not serve after {START_SECONDS:.0f} s") from error
    reason = last_line(state_dir.log_file(component.name))
    raise FailedPreconditionError(f"{component.name} does not start: {reason}", reason="SERVICE_DOES_NOT_START")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
