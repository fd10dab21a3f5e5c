"""The order in which a stage meets its training problems.

Position p of a stream is a pure function of the run's seed, the stage and p: every epoch is a fresh permutation of the
whole set, so that no problem comes twice before all have come once.
"""

import hashlib
import random
from functools import lru_cache

from npr_controller.datasets.problem import Problem, ProblemSet


def derived_seed(*parts: object) -> int:
    """62 bits that depend on every part, equal in every process."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 2


class ProblemStream:
    """An endless sequence over a finite set."""

    def __init__(self, problems: ProblemSet, *seed: object) -> None:
        self._problems = problems
        self._seed = seed
        self._permutation = lru_cache(maxsize=2)(self._shuffled)

    def take(self, start: int, count: int) -> list[Problem]:
        """The problems at positions `start` to `start + count - 1`."""
        return [self._at(position) for position in range(start, start + count)]

    def _at(self, position: int) -> Problem:
        epoch, offset = divmod(position, len(self._problems))
        return self._problems[self._permutation(epoch)[offset]]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._problems)))
        random.Random(derived_seed(*self._seed, epoch)).shuffle(order)
        return order
