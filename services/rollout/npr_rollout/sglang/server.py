"""The SGLang server: a child process, or one that runs already.

Invariants of the child:
- It ends with this process, however that ends: its standard input is a pipe whose other end is held here.
- It listens on the loopback interface, on a port that was free.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from npr_common.errors import FailedPreconditionError
from npr_rollout.sglang.settings import SglangSettings
from npr_sglang.launch import ENDS_WITH_STDIN, WITHOUT_PLUGIN

log = logging.getLogger(__name__)

_END_SECONDS = 10.0


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

    def end(self) -> None:
        """End it, if that is ours to do."""
        ...


class RemoteServer:
    """A server that others run: whether it lives is seen by asking it."""

    is_alive = True

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
        command = [
            settings.python,
            "-m",
            "npr_sglang",
            ENDS_WITH_STDIN,
            *([] if settings.plugin else [WITHOUT_PLUGIN]),
            *_arguments(model, port, settings),
        ]
        log.info("starting SGLang: %s", " ".join(command))
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, env=_environment(settings), start_new_session=True
            )
        except OSError as error:
            message = f"SGLang can't be started by {settings.python!r}: {error}; set NPR_SGLANG_PYTHON"
            raise FailedPreconditionError(message) from error

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def end(self) -> None:
        """End it with all its processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        assert self._process.stdin is not None
        self._process.stdin.close()


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
