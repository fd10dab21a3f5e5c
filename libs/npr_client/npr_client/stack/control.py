"""`up`, `down` and `status`: what the commands do to a stack. They block; one at a time acts on a state directory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from filelock import FileLock, Timeout

from npr_client.stack.components import COMPONENTS, with_needs
from npr_client.stack.layout import StateDir
from npr_client.stack.logs import last_line, rotate
from npr_client.stack.probes import Health
from npr_client.stack.processes import ProcessIdentity, wait_for_exit
from npr_client.stack.report import StackStatus, describe
from npr_client.stack.state import Phase, StackState, load_state, save_state
from npr_client.stack.stopping import DRAIN_SECONDS, stop_components
from npr_common.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError
from npr_common.files import write_atomically

UP_SECONDS = 300.0
POLL_SECONDS = 0.05
# So many starts in a row that failed are no accident.
HOPELESS_STARTS = 3

OnChange = Callable[[StackState], None]


def up(
    state_dir: StateDir,
    only: Sequence[str] | None = None,
    *,
    deadline_seconds: float = UP_SECONDS,
    on_change: OnChange = lambda _: None,
) -> StackState:
    """Brings the stack up, or heals it, and returns when every wanted component is healthy. Idempotent.

    `only` names the components to start (with what they need); others that run already go on running.

    Raises:
        FailedPreconditionError: a component does not start; the message has its last words, or its wrong variables.
        UnavailableError: the supervisor ended.
        DeadlineExceededError: it takes too long, or another command holds the stack.
    """
    wanted = with_needs(only or COMPONENTS)
    state_dir.create()
    with _command_lock(state_dir, deadline_seconds):
        wait = functools.partial(_wait_healthy, state_dir, wanted, deadline_seconds, on_change)
        state = load_state(state_dir.state_file)
        _dismiss_if_misconfigured(state)
        supervisor = _tell(state_dir, state, wanted)
        if supervisor is not None:
            with contextlib.suppress(UnavailableError):  # it was ending when it was told: start another
                return wait(supervisor)
        return wait(_start_supervisor(state_dir, state, wanted))


def down(state_dir: StateDir, *, deadline_seconds: float = 2 * DRAIN_SECONDS) -> bool:
    """Drains and stops all that this stack started; False when nothing ran. Idempotent."""
    if not state_dir.state_file.exists():
        return False
    with _command_lock(state_dir, deadline_seconds):
        state = load_state(state_dir.state_file)
        if state is None:
            return False
        ran = state.supervisor_alive or bool(state.living)
        if state.supervisor is not None:
            asyncio.run(_end_supervisor(state.supervisor, deadline_seconds))
        _stop_leftovers(state_dir)
        return ran


def status(state_dir: StateDir) -> StackStatus:
    """Every component's health as of now, by asking it."""
    return asyncio.run(describe(load_state(state_dir.state_file) or StackState()))


@contextmanager
def _command_lock(state_dir: StateDir, deadline_seconds: float) -> Iterator[None]:
    try:
        with FileLock(state_dir.command_lock, timeout=deadline_seconds):
            yield
    except Timeout as error:
        message = (
            f"another npr up or down holds {state_dir.root} since {deadline_seconds:.0f} s: wait for it or stop it"
        )
        raise DeadlineExceededError(message, reason="STACK_BUSY") from error


def _dismiss_if_misconfigured(state: StackState | None) -> None:
    """Kills a supervisor that has wrong settings in its environment; what it keeps is adopted by the next one."""
    if state is None or state.supervisor is None:
        return
    if any(component.phase is Phase.WRONG_SETTINGS for component in state.components.values()):
        state.supervisor.signal(signal.SIGKILL)
        asyncio.run(wait_for_exit(state.supervisor))


def _tell(state_dir: StateDir, state: StackState | None, wanted: Sequence[str]) -> ProcessIdentity | None:
    """Tells the living supervisor what is wanted besides what it keeps; None when there is no supervisor."""
    if state is None or state.supervisor is None or not state.supervisor.alive():
        return None
    kept = json.loads(state_dir.wanted_file.read_bytes())
    _write_wanted(state_dir, with_needs({*kept, *wanted}))
    state.supervisor.signal(signal.SIGHUP)
    return state.supervisor


def _write_wanted(state_dir: StateDir, wanted: Sequence[str]) -> None:
    write_atomically(state_dir.wanted_file, json.dumps(list(wanted)).encode())


def _start_supervisor(state_dir: StateDir, state: StackState | None, wanted: Sequence[str]) -> ProcessIdentity:
    """Starts one for what is wanted and for what an earlier supervisor left alive."""
    _write_wanted(state_dir, with_needs({*wanted, *(state.living if state else ())}))
    rotate(state_dir.supervisor_log)
    with state_dir.supervisor_log.open("ab") as output:
        process = subprocess.Popen(
            (sys.executable, "-m", "npr_client.stack.supervisor", str(state_dir.root)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return ProcessIdentity.of(process.pid)


def _wait_healthy(
    state_dir: StateDir,
    wanted: Sequence[str],
    deadline_seconds: float,
    on_change: OnChange,
    supervisor: ProcessIdentity,
) -> StackState:
    deadline = time.monotonic() + deadline_seconds
    seen: StackState | None = None
    while time.monotonic() < deadline:
        state = load_state(state_dir.state_file) or StackState()
        if state != seen:
            seen = state
            on_change(state)
        if _is_healthy(state, supervisor, wanted):
            return state
        _raise_if_hopeless(state_dir, supervisor, state, wanted)
        time.sleep(POLL_SECONDS)
    late = ", ".join(name for name in wanted if not (seen and seen.running(name)))
    message = f"not healthy after {deadline_seconds:.0f} s: {late}; see the logs in {state_dir.root / 'logs'}"
    raise DeadlineExceededError(message, reason="STACK_NOT_HEALTHY")


def _is_healthy(state: StackState, supervisor: ProcessIdentity, wanted: Sequence[str]) -> bool:
    """By the supervisor's account first, which is cheap to read, then by the components' own."""
    if not supervisor.same_as(state.supervisor) or not all(state.running(name) for name in wanted):
        return False
    status = asyncio.run(describe(state))
    health = {component.name: component.health for component in status.components}
    return status.supervisor_alive and all(health[name] is Health.SERVING for name in wanted)


def _raise_if_hopeless(
    state_dir: StateDir, supervisor: ProcessIdentity, state: StackState, wanted: Sequence[str]
) -> None:
    if not supervisor.alive():
        reason = last_line(state_dir.supervisor_log)
        raise UnavailableError(f"the stack's supervisor ended: {reason}", reason="SUPERVISOR_ENDED")
    if not supervisor.same_as(state.supervisor):
        return
    for name in wanted:
        component = state.component(name)
        if component.phase is Phase.WRONG_SETTINGS:
            variables = ", ".join(line.partition(":")[0] for line in component.last_error.splitlines())
            message = f"{name} does not start: correct {variables}, then `npr up` (log: {state_dir.log_file(name)})"
            raise FailedPreconditionError(message, reason="WRONG_SETTINGS", metadata={"service": name})
        if component.failed_starts >= HOPELESS_STARTS:
            message = f"{name} does not start: {component.last_error} (log: {state_dir.log_file(name)})"
            raise FailedPreconditionError(message, reason="SERVICE_DOES_NOT_START", metadata={"service": name})


async def _end_supervisor(supervisor: ProcessIdentity, deadline_seconds: float) -> None:
    supervisor.signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(deadline_seconds):
            await wait_for_exit(supervisor)
    except TimeoutError:
        supervisor.signal(signal.SIGKILL)
        await wait_for_exit(supervisor)


def _stop_leftovers(state_dir: StateDir) -> None:
    """What a supervisor that was killed could not stop; nothing after one that ended well."""
    state = load_state(state_dir.state_file) or StackState()
    stopped = asyncio.run(stop_components(state)).with_supervisor(None)
    save_state(state_dir.state_file, stopped)
