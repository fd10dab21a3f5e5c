"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections import defaultdict


class Stopwatch:
    """Adds up seconds by name.

    Attributes:
        of: seconds by name.
    """

    def __init__(self) -> None:
        self.of: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def start(self) -> None:
        """What follows is counted by the next lap."""
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Count the time since the last lap or start under a name."""
        now = time.perf_counter()
        self.of[name] += now - self._last
        self._last = now
