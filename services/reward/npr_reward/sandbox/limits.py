"""The limits of a sandbox process. It sets them on itself before it reads a job; they hold until it dies."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What one job may use.

    Attributes:
        deadline_seconds: wall-clock time, enforced by the service, which kills the process.
        memory_mib: address space of the process.
    """

    deadline_seconds: float = 5.0
    memory_mib: int = 1024

    def confine(self) -> None:
        """Limits this process for good: memory, no core dumps, no outliving its parent, deaf to Ctrl-C."""
        memory_bytes = self.memory_mib * 1024 * 1024
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent()

    def grant_cpu(self) -> None:
        """Allows one more job's CPU time: a backstop that holds even if the service itself is stopped."""
        spent_seconds = math.ceil(time.process_time() + self.deadline_seconds) + 1
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (spent_seconds, hard))


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends.

    A worker's parent is the fork server, whose parent is the service: a chain, so that even a worker in an endless loop
    ends with the service. Pipes alone don't do: a busy worker reads none, and holds one that keeps the fork server.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() == 1:  # it ended before the call
        sys.exit(1)
