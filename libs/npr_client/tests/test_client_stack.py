"""The local stack with its real processes: Valkey and the buffer, which start fast."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from npr_client import stack
from npr_client.stack import StateDir
from npr_client.stack.components import COMPONENTS, dependents, with_needs
from npr_client.stack.logs import size, wrong_settings
from npr_client.stack.probes import Health
from npr_client.stack.processes import COMPONENT_VARIABLE, STACK_VARIABLE, ProcessIdentity, marked_processes
from npr_client.stack.state import Phase, StackState, load_state, save_state
from npr_common.errors import DataLossError, FailedPreconditionError, InvalidArgumentError

ONLY = ("buffer",)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[StateDir]:
    state_dir = StateDir.at(tmp_path / "npr")
    yield state_dir
    stack.down(state_dir)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def state_of(place: StateDir) -> StackState:
    state = load_state(place.state_file)
    assert state is not None
    return state


def process_of(state: StackState, name: str) -> ProcessIdentity:
    process = state.component(name).process
    assert process is not None
    return process


def test_up_starts_what_is_needed_and_down_leaves_no_process(place: StateDir) -> None:
    state = stack.up(place, ONLY)

    assert {c.name for c in stack.status(place).components if c.health is Health.SERVING} == {"valkey", "buffer"}
    assert stack.status(place).queue is not None
    assert stack.status(place).healthy

    processes = [process_of(state, "valkey"), process_of(state, "buffer"), state.supervisor]
    assert stack.down(place)
    assert not any(process.alive() for process in processes if process)
    assert list(marked_processes(state.stack_id)) == []
    assert not stack.down(place)
    assert not stack.status(place).healthy


def test_up_is_idempotent(place: StateDir) -> None:
    first = stack.up(place, ONLY)
    second = stack.up(place, ONLY)

    assert second == first


@pytest.mark.parametrize("name", ["valkey", "buffer"])
def test_a_killed_component_comes_back_at_its_address(place: StateDir, name: str) -> None:
    before = stack.up(place, ONLY)
    process_of(before, name).signal(signal.SIGKILL)

    until(lambda: state_of(place).running(name) and process_of(state_of(place), name) != process_of(before, name))
    after = stack.up(place, ONLY)
    assert after.component(name).address == before.component(name).address
    assert after.component(name).restarts == 1
    until(lambda: stack.status(place).healthy)


def test_a_new_supervisor_adopts_living_services(place: StateDir) -> None:
    before = stack.up(place, ONLY)
    assert before.supervisor is not None
    before.supervisor.signal(signal.SIGKILL)
    until(lambda: not state_of(place).supervisor_alive)

    after = stack.up(place, ["valkey"])
    assert after.supervisor != before.supervisor
    until(lambda: state_of(place).running("buffer"))  # kept although nobody asked for it again
    assert {name: process_of(state_of(place), name) for name in ("valkey", "buffer")} == {
        name: process_of(before, name) for name in ("valkey", "buffer")
    }


def test_down_without_a_supervisor_stops_what_it_left(place: StateDir) -> None:
    state = stack.up(place, ONLY)
    assert state.supervisor is not None
    state.supervisor.signal(signal.SIGKILL)
    until(lambda: not state_of(place).supervisor_alive)

    assert stack.down(place)
    assert not process_of(state, "valkey").alive()
    assert not process_of(state, "buffer").alive()


def test_a_restart_uses_the_same_addresses(place: StateDir) -> None:
    before = stack.up(place, ONLY)
    stack.down(place)
    after = stack.up(place, ONLY)

    assert after.addresses == before.addresses


def test_a_taken_port_moves_the_component_and_tells_its_dependents(place: StateDir) -> None:
    before = stack.up(place, ONLY)
    stack.down(place)
    address = before.component("valkey").address
    assert address is not None
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        stranger.listen()
        after = stack.up(place, ONLY)

    assert after.component("valkey").address != address
    assert after.component("buffer").launched_with["valkey"] == after.component("valkey").address
    assert stack.status(place).healthy


def test_a_recycled_pid_is_never_signalled(place: StateDir) -> None:
    """A stale state names a pid that belongs to somebody else now."""
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        stale = ProcessIdentity(pid=stranger.pid, started_at=time.time() - 86_400)
        place.create()
        component = StackState().component("buffer").model_copy(update={"process": stale})
        save_state(place.state_file, StackState(supervisor=stale).with_component("buffer", component))

        assert not stack.down(place)
        assert stranger.poll() is None
        state = stack.up(place, ONLY)
        assert process_of(state, "buffer").pid != stranger.pid
        stack.down(place)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_two_ups_at_once_make_one_stack(place: StateDir) -> None:
    command = [sys.executable, "-m", "npr_client.cli.main", "up", "--only", "valkey", "--state-dir", str(place.root)]
    ups = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)]
    outcomes = [(process.communicate(timeout=60)[1], process.returncode) for process in ups]

    assert [code for _, code in outcomes] == [0, 0], outcomes
    supervisors = [p for p in psutil.process_iter(["cmdline"]) if str(place.root) in (p.info["cmdline"] or [])]
    assert len(supervisors) == 1
    assert len(list(marked_processes(state_of(place).stack_id))) == 1


def test_processes_that_no_record_names_are_found_by_their_mark(place: StateDir) -> None:
    state = stack.up(place, ["valkey"])
    marks = {STACK_VARIABLE: state.stack_id, COMPONENT_VARIABLE: "buffer"}
    stray = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, **marks})
    until(lambda: ProcessIdentity.of(stray.pid) in list(marked_processes(state.stack_id, "buffer")))

    stack.down(place)
    assert stray.wait(timeout=10) == -signal.SIGKILL


def test_a_service_that_cannot_start_is_told_with_its_last_words(
    place: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPR_TLS_CERTIFICATE", "/nowhere/certificate.pem")
    monkeypatch.setenv("NPR_TLS_KEY", "/nowhere/key.pem")
    with pytest.raises(FailedPreconditionError, match=r"buffer does not start: .*exit code 1.*key\.pem"):
        stack.up(place, ONLY)


def test_wrong_settings_are_told_at_once_and_right_ones_heal_the_stack(
    place: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPR_BUFFER_MAX_OPEN_GROUPS", "many")
    with pytest.raises(FailedPreconditionError, match="correct NPR_BUFFER_MAX_OPEN_GROUPS, then `npr up`"):
        stack.up(place, ONLY)
    before = state_of(place)
    buffer = before.component("buffer")
    assert buffer.phase is Phase.WRONG_SETTINGS
    assert buffer.last_error.startswith("NPR_BUFFER_MAX_OPEN_GROUPS: Input should be a valid integer")
    assert buffer.restarts == 0

    monkeypatch.setenv("NPR_BUFFER_MAX_OPEN_GROUPS", "9")
    after = stack.up(place, ONLY)
    assert process_of(after, "valkey") == process_of(before, "valkey")
    assert after.component("buffer").last_error == ""


def test_only_lines_of_the_process_itself_name_wrong_variables(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("NPR_A: from an earlier start\n")
    begin = size(log)
    with log.open("a") as file:
        file.write("a warning\nNPR_B: wrong\n")
    assert wrong_settings(log, begin) == ["NPR_B: wrong"]


def test_a_damaged_state_file_is_a_typed_error(place: StateDir) -> None:
    place.create()
    place.state_file.write_text('{"stack_id": 3', encoding="utf-8")
    with pytest.raises(DataLossError, match="delete the file"):
        stack.status(place)
    place.state_file.unlink()


def test_an_unknown_component_is_named(place: StateDir) -> None:
    with pytest.raises(InvalidArgumentError, match="'bufer'"):
        stack.up(place, ["bufer"])


def test_starting_order_is_acyclic_and_complete() -> None:
    order = with_needs(reversed(COMPONENTS))
    assert set(order) == set(COMPONENTS)
    for name in order:
        assert all(order.index(need) < order.index(name) for need in COMPONENTS[name].needs)
        assert all(name in COMPONENTS[dependent].needs for dependent in dependents(name))
    assert with_needs(["rollout"]) == ("valkey", "buffer", "reward", "rollout")


def test_the_state_directory_is_the_owners_alone(place: StateDir) -> None:
    place.create()
    assert place.root.stat().st_mode & 0o077 == 0
