"""A service as a process of its own, for tests that kill it and benchmarks that measure it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

START_SECONDS = 60.0


class ServiceProcess:
    """`python -m MODULE` on loopback. It keeps its address when it is killed or stopped and started again."""

    def __init__(self, module: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.module = module
        self.address = "127.0.0.1:0"
        self._folder = folder
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the running process. Raises RuntimeError when there is none."""
        if self._process is None:
            raise RuntimeError(f"{self.module} does not run: start it first")
        return self._process.pid

    def start(self) -> None:
        """Starts it and returns when it is healthy.

        Raises:
            RuntimeError: it ended, or was not healthy within `START_SECONDS`; the message names its log.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        address_file = self._folder / f"{self.module}.address"
        address_file.unlink(missing_ok=True)
        self._process = self._spawn(address_file)
        deadline = time.monotonic() + START_SECONDS
        while not _is_healthy(address_file):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self.module} did not become healthy; see {self._log}")
            time.sleep(0.02)
        self.address = address_file.read_text("utf-8")

    def kill(self) -> None:
        """kill -9, as a crash would; nothing happens when it doesn't run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> int:
        """SIGTERM; the exit code, once it has drained."""
        if self._process is None:
            raise RuntimeError(f"{self.module} does not run: start it first")
        self._process.terminate()
        code = self._process.wait(timeout=START_SECONDS)
        self._process = None
        return code

    @property
    def _log(self) -> Path:
        return self._folder / f"{self.module}.log"

    def _spawn(self, address_file: Path) -> subprocess.Popen[bytes]:
        own = {"NPR_LISTEN": self.address, "NPR_ADDRESS_FILE": str(address_file), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **own, **self._environment}
        with self._log.open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", self.module], env=environment, stdout=log, stderr=log)


@contextmanager
def service_process(module: str, folder: Path, environment: Mapping[str, str]) -> Iterator[ServiceProcess]:
    """A healthy service, which is killed at the end if it still runs; its log and address lie in `folder`."""
    process = ServiceProcess(module, folder, environment)
    process.start()
    try:
        yield process
    finally:
        process.kill()


def _is_healthy(address_file: Path) -> bool:
    """Whether the service has bound a port and says that it serves."""
    if not address_file.exists():
        return False
    with grpc.insecure_channel(address_file.read_text("utf-8")) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # the package's stubs leave the methods out
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
