"""The supervisor process: `python -m npr_client.stack.supervisor STATE_DIR`.

SIGTERM or SIGINT stops the stack, drained, and then the supervisor. SIGHUP reads again which components are wanted.
kill -9 of the supervisor leaves the services as they are; the next `npr up` starts a supervisor that adopts them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path

from filelock import FileLock, Timeout

from npr_client.stack.board import Board
from npr_client.stack.components import with_needs
from npr_client.stack.keeper import make_keeper
from npr_client.stack.layout import StateDir
from npr_client.stack.processes import ProcessIdentity
from npr_client.stack.state import Phase, StackState, load_state
from npr_client.stack.stopping import stop_components
from npr_common import telemetry

log = logging.getLogger(__name__)


async def supervise(state_dir: StateDir) -> None:
    """Keeps the wanted components alive until told to stop."""
    stop, reload = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)

    state = _taken_over(load_state(state_dir.state_file) or StackState())
    board = Board(state_dir, state)
    await board.replace(state)
    keeping = asyncio.create_task(_keep(board, state_dir, reload))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({keeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if keeping.done():
        keeping.result()  # a fault of ours: the traceback goes to the log, the services live on
    keeping.cancel()
    await asyncio.wait({keeping})
    await board.replace(await stop_components(board.state))
    await board.replace(board.state.with_supervisor(None))


async def _keep(board: Board, state_dir: StateDir, reload: asyncio.Event) -> None:
    """One keeper a wanted component; more of them when more are wanted."""
    kept: set[str] = set()
    async with asyncio.TaskGroup() as tasks:
        while True:
            reload.clear()
            for name in read_wanted(state_dir):
                if name not in kept:
                    kept.add(name)
                    tasks.create_task(make_keeper(name, board, state_dir).run())
            await reload.wait()


def read_wanted(state_dir: StateDir) -> tuple[str, ...]:
    """The components that `npr up` asked for, with all that they need."""
    return with_needs(json.loads(state_dir.wanted_file.read_bytes()))


def _taken_over(state: StackState) -> StackState:
    """The state under this supervisor: nothing counts as healthy until it has been probed anew, nothing as failed."""
    components = {
        name: component.model_copy(
            update={
                "phase": Phase.STARTING if component.process else Phase.STOPPED,
                "failed_starts": 0,
                "last_error": "",
            }
        )
        for name, component in state.components.items()
    }
    return state.model_copy(update={"components": components}).with_supervisor(ProcessIdentity.of(os.getpid()))


def main() -> None:
    """Takes the state directory's lock and supervises; exits with 3 when another supervisor has it."""
    logging.basicConfig(level=logging.INFO, format=telemetry.LOG_FORMAT, stream=sys.stderr)
    state_dir = StateDir(Path(sys.argv[1]))
    try:
        with FileLock(state_dir.supervisor_lock, timeout=0):
            asyncio.run(supervise(state_dir))
    except Timeout:
        log.critical("another supervisor keeps %s", state_dir.root)
        sys.exit(3)


if __name__ == "__main__":
    main()
