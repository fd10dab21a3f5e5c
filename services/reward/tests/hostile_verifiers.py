"""Verifiers that misbehave on demand, loaded through the service's own setting for extra verifiers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

from npr_reward.verdict import Verdict
from npr_reward.verifiers import Verifier


class HostileVerifier(Verifier):
    """Does what the answer says; its pid is the reason of a verdict."""

    name = "hostile"
    description = "Loops, exhausts memory or dies, as the answer asks."

    def judge(self, answer: str, gold: str, metadata: Mapping[str, str]) -> Verdict:
        """Correct unless the process ends first."""
        match answer.split():
            case ["loop"]:
                while True:
                    pass
            case ["deaf"]:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(3600)
            case ["memory"]:
                hoard = []
                while True:
                    hoard.append(bytearray(16 << 20))
            case ["raise"]:
                raise RuntimeError("a verifier with a bug")
            case ["exit"]:
                os._exit(3)
            case ["once", path]:
                _die_the_first_time(path)
        return Verdict.correct(str(os.getpid()))


def _die_the_first_time(path: str) -> None:
    """Ends the process unless `path` exists, and makes it."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os._exit(3)
