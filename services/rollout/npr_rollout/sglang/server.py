"""The SGLang server: a child process, or one that runs already.

Invariants of the child:
- It ends with this process, however that ends: its standard input is a pipe whose other end is held here.
- It listens on the loopback interface, on a port that was free.
- What it writes is passed on to standard error; its last words are kept, in case it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from npr_common.config import WrongSettingsError
from npr_common.errors import FailedPreconditionError
from npr_rollout.sglang.settings import SglangSettings
from npr_sglang.launch import CHECK, ENDS_WITH_STDIN, WITHOUT_PLUGIN

log = logging.getLogger(__name__)

_END_SECONDS = 10.0
_LISTEN_SECONDS = 2.0
_CHECK_SECONDS = 300.0  # most of it is spent importing
_KEPT_LINES = 200
_VARIABLES = {
    "--device": "DEVICE",
    "--dtype": "DTYPE",
    "--tp-size": "TENSOR_PARALLEL",
    "--attention-backend": "ATTENTION_BACKEND",
}
"""Arguments of the server that can be wrong though their variables (`NPR_SGLANG_...`) look right."""

_CAUSE = re.compile(r"^(?:\S+: )?(?:\w+\.)*\w*(?:Error|Exception)\b:? ?.*")


class Server(Protocol):
    """A server.

    Attributes:
        url: where it answers, once it does.
    """

    url: str

    @property
    def is_alive(self) -> bool:
        """Whether it may answer."""
        ...

    @property
    def last_words(self) -> str:
        """Why it has ended, as far as it said so."""
        ...

    def end(self) -> None:
        """End it, if that is ours to do."""
        ...


class RemoteServer:
    """A server that others run: whether it lives is seen by asking it."""

    is_alive = True
    last_words = ""

    def __init__(self, url: str) -> None:
        self.url = url

    def end(self) -> None:
        """It goes on."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server is started with.

    Attributes:
        folder: a policy's files.
        context: RoPE positions that the model knows.
        dtype: type of the weights. It is always said: SGLang's own choice for float32 would be float16.
        stamp: what the server says of its weights, until others are loaded.
    """

    folder: Path
    context: int
    dtype: str
    stamp: str = ""


class SglangServer:
    """A server with one policy's weights; see the module's docstring.

    Attributes:
        url: where it answers, once it does.
    """

    def __init__(self, model: ServedModel, settings: SglangSettings) -> None:
        """Start it; it takes a while until it answers. Raises FailedPreconditionError when there is no such Python."""
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = _command(settings, ENDS_WITH_STDIN, model, port)
        log.info("starting SGLang: %s", " ".join(command))
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(settings),
                start_new_session=True,
            )
        except OSError as error:
            message = f"SGLang can't be started by {settings.python!r}: {error}; set NPR_SGLANG_PYTHON"
            raise FailedPreconditionError(message) from error
        assert self._process.stdout is not None
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self._listener = threading.Thread(target=_pass_on, args=(self._process.stdout, self._kept), daemon=True)
        self._listener.start()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def last_words(self) -> str:
        """The last error in its log."""
        self._listener.join(_LISTEN_SECONDS)
        return _cause(list(self._kept))

    def end(self) -> None:
        """End it with all its processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._listener.join(_LISTEN_SECONDS)


def check_setup(settings: SglangSettings) -> None:
    """Whether a server can be started with these settings here, as far as that is to be seen without a model.

    Raises:
        WrongSettingsError: it can't; with the variable that is to be changed.
    """
    dtype = settings.dtype.removeprefix("torch.")
    command = _command(settings, CHECK, ServedModel(Path(), context=1, dtype=dtype), port=0)
    try:
        found = subprocess.run(
            command, env=_environment(settings), capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WrongSettingsError({"NPR_SGLANG_PYTHON": f"{settings.python} can't be run: {error}"}) from error
    if found.returncode != 0:
        raise WrongSettingsError(_wrong_variable(settings, _last(found.stderr.splitlines())))


def _wrong_variable(settings: SglangSettings, why: str) -> dict[str, str]:
    about = re.match(r"argument (--[\w-]+)", why)
    if about is None and why.startswith("unrecognized arguments"):
        return {"NPR_SGLANG_ARGUMENTS": why}
    if about is None:
        return {"NPR_SGLANG_PYTHON": f"{settings.python} can't serve: {why} (docs/sglang.md: Set up)"}
    return {f"NPR_SGLANG_{_VARIABLES.get(about[1], 'ARGUMENTS')}": why}


def _pass_on(words: IO[bytes], kept: deque[str]) -> None:
    """Write a process's words to standard error, and keep the last lines."""
    with words:
        for line in words:
            with contextlib.suppress(OSError):
                os.write(2, line)
            kept.append(line.decode(errors="replace").rstrip())


def _cause(lines: Sequence[str]) -> str:
    """The last line that names an error; else the last one."""
    errors = [line for line in lines if _CAUSE.match(line)]
    return errors[-1] if errors else _last(lines)


def _last(lines: Sequence[str]) -> str:
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said else "it says nothing"


def _command(settings: SglangSettings, switch: str, model: ServedModel, port: int) -> list[str]:
    switches = [switch, *([] if settings.plugin else [WITHOUT_PLUGIN])]
    return [settings.python, "-m", "npr_sglang", *switches, *_arguments(model, port, settings)]


def _arguments(model: ServedModel, port: int, settings: SglangSettings) -> list[str]:
    arguments = {
        "--model-path": model.folder,
        "--host": "127.0.0.1",
        "--port": port,
        "--device": settings.device,
        "--dtype": model.dtype,
        "--tp-size": settings.tensor_parallel,
        "--stream-interval": settings.stream_interval,
        "--context-length": settings.input_tokens or (2 * model.context if settings.plugin else model.context),
        "--attention-backend": settings.attention_backend,
        "--mem-fraction-static": settings.memory_fraction or "",
        "--max-total-tokens": settings.pool_tokens or "",
        "--weight-version": model.stamp,
        "--log-level": "warning",
    }
    switches = ["--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"]
    overlap = settings.overlap if settings.overlap is not None else settings.device != "cpu"
    if not overlap:
        switches.append("--disable-overlap-schedule")
    if settings.device == "cuda" and not settings.cuda_graphs:
        switches.append("--disable-cuda-graph")
    if settings.memory_saver:
        switches.append("--enable-memory-saver")
    named = [text for name, value in arguments.items() if value != "" for text in (name, str(value))]
    return [*named, *switches, *settings.arguments]


def _environment(settings: SglangSettings) -> dict[str, str]:
    environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
    if settings.device == "cpu":
        # Its threads spin, and a batch takes 40 times as long where they outnumber the cores.
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(settings.threads)}
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
