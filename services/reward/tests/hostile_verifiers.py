"""Verifiers that misbehave on demand, loaded through the service's own setting for extra verifiers."""

from __future__ import annotations

import os
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
            case ["memory"]:
                hoard = []
                while True:
                    hoard.append(bytearray(16 << 20))
            case ["raise"]:
                raise RuntimeError("a verifier with a bug")
            case ["exit"]:
                os._exit(3)
            case ["loop-once", path] if _is_new(path):
                while True:
                    pass
        return Verdict.correct(str(os.getpid()))


def _is_new(path: str) -> bool:
    """Makes the file at `path`; whether it was not there before."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
