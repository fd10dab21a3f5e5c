"""Who is admitted next: by priority, then evenly across jobs, then first come, first served.

Invariants:
- Among waiting trajectories of the highest priority, the next one is of the job that has the fewest running; a job of
  ten thousand prompts does not keep one of ten waiting.
- Within a job and a priority, the order is that of arrival, also for those that come back after a preemption.
- Those that end while they wait are skipped.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from npr_rollout.record.trajectory import Trajectory


@dataclass(order=True, slots=True)
class _Waiting:
    arrival: int
    trajectory: Trajectory = field(compare=False)


class WaitingLine:
    """The trajectories that wait for admission."""

    def __init__(self) -> None:
        self._lines: dict[int, dict[str, list[_Waiting]]] = {}  # priority -> job -> heap by arrival

    def __len__(self) -> int:
        heaps = (heap for jobs in self._lines.values() for heap in jobs.values())
        return sum(not entry.trajectory.finished for heap in heaps for entry in heap)

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, trajectory: Trajectory) -> None:
        """Put a trajectory in line."""
        jobs = self._lines.setdefault(trajectory.request.priority, {})
        heapq.heappush(jobs.setdefault(trajectory.request.job, []), _Waiting(trajectory.arrival, trajectory))

    def next(self, running: Counter[str]) -> Trajectory | None:
        """Who is to be admitted next, given how many of each job run; None when nobody waits."""
        self._drop_finished()
        if not self._lines:
            return None
        jobs = self._lines[max(self._lines)]
        job = min(jobs, key=lambda name: (running[name], jobs[name][0].arrival))
        return jobs[job][0].trajectory

    def pop(self, trajectory: Trajectory) -> None:
        """Take out whom `next` named."""
        self._take(trajectory.request.priority, trajectory.request.job)

    def _drop_finished(self) -> None:
        for priority, job in list(self._heads()):
            while (heap := self._lines.get(priority, {}).get(job)) and heap[0].trajectory.finished:
                self._take(priority, job)

    def _heads(self) -> Iterator[tuple[int, str]]:
        return ((priority, job) for priority, jobs in self._lines.items() for job in jobs)

    def _take(self, priority: int, job: str) -> None:
        jobs = self._lines[priority]
        heapq.heappop(jobs[job])
        if not jobs[job]:
            del jobs[job]
        if not jobs:
            del self._lines[priority]
