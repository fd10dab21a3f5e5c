"""Who runs: admission, and who gives way under page pressure.

Invariants:
- Higher priority first, then first come, first served; a preempted trajectory keeps its place.
- Whole trajectories are preempted, lowest priority and youngest first. The first in line never gives way, and alone it
  always fits (requests that could not are refused at once; forks that could not are refused by validation). So there
  is progress in every step.
- Before a forward pass is planned, the pool can pay for all of it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from npr_rollout.engine.feeding import Feeder
from npr_rollout.engine.kv_pool import KvPool, PageAccountingError
from npr_rollout.engine.trajectory import Trajectory


@dataclass(order=True, slots=True)
class _Waiting:
    rank: tuple[int, int]
    trajectory: Trajectory = field(compare=False)


def _rank(trajectory: Trajectory) -> tuple[int, int]:
    """Smaller runs earlier."""
    return -trajectory.request.priority, trajectory.arrival


class Scheduler:
    """The queue and the running set.

    Attributes:
        running: trajectories that are being decoded.
    """

    def __init__(self, pool: KvPool, feeder: Feeder, max_running: int, max_prefill_tokens: int) -> None:
        self._pool = pool
        self._feeder = feeder
        self._max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens
        self._waiting: list[_Waiting] = []
        self.running: list[Trajectory] = []

    @property
    def waiting_count(self) -> int:
        """Trajectories that wait for admission."""
        return sum(not entry.trajectory.finished for entry in self._waiting)

    def add(self, trajectory: Trajectory) -> None:
        """Put a trajectory in line."""
        heapq.heappush(self._waiting, _Waiting(_rank(trajectory), trajectory))

    def remove_finished(self) -> None:
        """Forget running trajectories that have ended."""
        self.running = [trajectory for trajectory in self.running if not trajectory.finished]

    def schedule(self) -> tuple[list[Trajectory], list[Trajectory]]:
        """Make room for the coming step and admit who fits beside those who run.

        Returns:
            Those admitted, and those preempted.
        """
        preempted = self._make_room()
        return ([] if preempted else self._admit()), preempted

    def _make_room(self) -> list[Trajectory]:
        preempted = []
        while self._need(self.running) > self._pool.free_pages:
            if len(self.running) == 1:
                raise PageAccountingError("A trajectory alone does not fit into the pool: validation let it through.")
            victim = max(self.running, key=_rank)
            self.running.remove(victim)
            self._feeder.release(victim)
            victim.preemptions += 1
            self.add(victim)
            preempted.append(victim)
        return preempted

    def _admit(self) -> list[Trajectory]:
        admitted: list[Trajectory] = []
        prefill = 0
        need = self._need(self.running)
        while self._waiting and len(self.running) < self._max_running:
            trajectory = self._waiting[0].trajectory
            if not trajectory.finished:
                tokens = sum(len(span.tokens) for span in trajectory.spans())
                need += self._feeder.pages_needed(trajectory)
                # A page for each that runs keeps newcomers from being preempted in their first steps.
                headroom = len(self.running) if self.running else 0
                if need + headroom > self._pool.free_pages or (
                    admitted and prefill + tokens > self._max_prefill_tokens
                ):
                    break
                prefill += tokens
                admitted.append(trajectory)
                self.running.append(trajectory)
            heapq.heappop(self._waiting)
        return admitted

    def _need(self, trajectories: list[Trajectory]) -> int:
        """Pages that the coming step allocates at most."""
        settled = [span for trajectory in trajectories if trajectory.settled for span in trajectory.active]
        return self._feeder.pages_needed_by(settled) + sum(
            self._feeder.pages_needed(trajectory) for trajectory in trajectories if not trajectory.settled
        )
