"""A real Valkey on loopback for the length of a test."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from npr_common.embedded_valkey import valkey_command
from npr_common.ports import free_port

START_SECONDS = 10.0


class ValkeyProcess:
    """One server on one port and folder; it can be killed and started again on the same data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """redis-py's URL of the server."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Starts it and waits until it answers PING with PONG (data loaded)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "valkey.out").open("ab") as output:
            self._process = subprocess.Popen(valkey_command(self.folder, self.port), stdout=output, stderr=output)
        deadline = time.monotonic() + START_SECONDS
        while not _answers(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Valkey did not start; see {self.folder / 'valkey.out'}")
            time.sleep(0.02)

    def kill(self) -> None:
        """kill -9, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def valkey_server(folder: Path) -> Iterator[ValkeyProcess]:
    """A running Valkey with its append-only file in `folder`."""
    process = ValkeyProcess(folder)
    process.start()
    try:
        yield process
    finally:
        process.kill()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
