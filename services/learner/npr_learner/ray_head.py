"""A Ray cluster of this machine's own: `python -m npr_learner.ray_head CPUS` runs one until its standard input ends.

It is a process of its own for two reasons. Ray forks, which a process that already serves gRPC does not survive. And a
learner that is killed leaves nothing behind: its end of the pipe closes, and the cluster ends.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from typing import Any

LOCAL = "local"
"""The address that stands for such a cluster."""

_LOOPBACK = "127.0.0.2" if sys.platform == "linux" else None
"""An address that no other machine reaches. Ray takes 127.0.0.1 for the machine's outer address where one connects."""


def prepare_environment() -> None:
    """Sets the token that the local cluster asks for; to be called before Ray is imported, which is when it is read."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


class RayHead:
    """The cluster, from outside. It ends with this process."""

    def __init__(self, cpus: int) -> None:
        """Starts a cluster for actors that need so many CPUs together. Raises RuntimeError if it can't be started."""
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}  # none of it leaves the machine
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the local Ray cluster ended with code {self._process.wait()}")
        self.address: str = json.loads(line)["address"]


def main() -> None:
    """Starts the cluster, prints its address, waits for the end of the input, and ends it."""
    import ray  # noqa: PLC0415  # see `prepare_environment`

    context: Any = ray.init(
        "local", num_cpus=int(sys.argv[1]), include_dashboard=False, log_to_driver=False, _node_ip_address=_LOOPBACK
    )
    print(json.dumps({"address": context.address_info["address"]}), flush=True)  # noqa: T201  # the parent reads it
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
