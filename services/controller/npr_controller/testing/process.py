"""A service as its own process, for tests that kill it."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

START_SECONDS = 20.0


class ServiceProcess:
    """`python -m MODULE` on a free loopback port. `address` is what the service bound."""

    def __init__(self, module: str, environment: Mapping[str, str], address_file: Path) -> None:
        served = {"NPR_ADDRESS_FILE": str(address_file), "NPR_LISTEN": "127.0.0.1:0"}
        self._process = subprocess.Popen([sys.executable, "-m", module], env={**os.environ, **environment, **served})
        deadline = time.monotonic() + START_SECONDS
        while not address_file.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{module} did not start; its output says why")
            time.sleep(0.02)
        self.address = address_file.read_text()

    def kill(self) -> None:
        """kill -9, as a crash would."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self._process.terminate()
        return self._process.wait(timeout=START_SECONDS)
