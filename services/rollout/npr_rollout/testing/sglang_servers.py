"""SGLang servers for tests and benchmarks: on a CPU, unless the environment (`NPR_SGLANG_...`) names a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from npr_rollout.sglang.client import wait_until_healthy
from npr_rollout.sglang.server import ServedModel, SglangServer
from npr_rollout.sglang.settings import SglangSettings
from npr_rollout.sglang.transport import Transport


def settings_for(
    python: str, pool_tokens: int, *, stream_interval: int = 8, threads: int = 1, overlap: bool | None = None
) -> SglangSettings:
    """Settings of a server with a pool of so many tokens; `python` is the one that has SGLang."""
    asked = SglangSettings(
        python=python,
        pool_tokens=pool_tokens,
        input_tokens=pool_tokens,
        stream_interval=stream_interval,
        threads=threads,
        overlap=overlap,
    )
    if "NPR_SGLANG_DEVICE" in os.environ:
        return asked
    return asked.model_copy(update={"device": "cpu", "attention_backend": "torch_native"})


class OwnServers:
    """The servers that this process starts from now on; those that it has already are another test's."""

    def __init__(self) -> None:
        self._others = self._running()

    def running(self) -> set[int]:
        """The process ids of those that run."""
        return self._running() - self._others

    @staticmethod
    def _running() -> set[int]:
        children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        return {child.pid for child in children if "npr_sglang" in " ".join(child.cmdline())}


@contextmanager
def sglang_server(model: ServedModel, settings: SglangSettings) -> Iterator[Transport]:
    """The wire to a server that answers; it ends with the block."""
    process = SglangServer(model, settings)
    transport = Transport(process.url)
    try:
        transport.ask(lambda client: wait_until_healthy(client, lambda: process.is_alive, settings.start_seconds))
        yield transport
    finally:
        transport.close()
        process.end()
