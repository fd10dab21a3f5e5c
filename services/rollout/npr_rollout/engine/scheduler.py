"""Who runs: admission, the prefill budget of a step, and who gives way under page pressure.

Invariants:
- Whole trajectories are preempted, lowest priority and youngest first. The oldest of the highest priority never gives
  way, and alone it always fits (requests that could not are refused at once; forks that could not are refused by
  validation). So it advances in every step, a join never waits for memory for ever, and everybody's turn comes.
- Cached prompts are evicted before anybody is preempted, and as many as are needed before a pass is planned.
- Before a forward pass is planned, the pool can pay for all that the running ones lack, not just for its part.
- Decoding never waits for a prefill: a step feeds at most `prefill_tokens` beside the tokens that decode.
"""

from __future__ import annotations

from collections import Counter

from npr_rollout.engine.feeding import Chunk, Feeder
from npr_rollout.engine.kv_pool import KvPool, PageAccountingError
from npr_rollout.engine.prompts import SharedPrompts
from npr_rollout.record.trajectory import Span, Trajectory
from npr_rollout.record.waiting_line import WaitingLine

_SHORT = 64  # tokens; what a fork or a join adds goes before prompts, so that those who decode keep decoding


def _rank(trajectory: Trajectory) -> tuple[int, int]:
    """Smaller keeps its pages longer."""
    return -trajectory.request.priority, trajectory.arrival


class Scheduler:
    """The waiting line and the running set.

    Attributes:
        running: trajectories that are being decoded.
        waiting: those that wait for admission.
    """

    def __init__(
        self, pool: KvPool, prompts: SharedPrompts, feeder: Feeder, max_running: int, prefill_tokens: int
    ) -> None:
        self._pool = pool
        self._prompts = prompts
        self._feeder = feeder
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self.waiting = WaitingLine()
        self.running: list[Trajectory] = []

    def add(self, trajectory: Trajectory) -> None:
        """Put a trajectory in line."""
        self.waiting.add(trajectory)

    def remove_finished(self) -> None:
        """Forget running trajectories that have ended."""
        self.running = [trajectory for trajectory in self.running if not trajectory.finished]

    def schedule(self) -> tuple[list[Trajectory], list[Trajectory]]:
        """Make room for the coming step and admit who fits beside those who run.

        Returns:
            Those admitted, and those preempted.
        """
        preempted, need = self._make_room()
        admitted: list[Trajectory] = []
        if not preempted and self.waiting:
            admitted = self._admit(need)
            need = self._need() if admitted else need
        while self._pool.free_pages < need:
            self._prompts.evict()
        return admitted, preempted

    def plan(self) -> tuple[list[Span], list[Chunk]]:
        """What the coming pass feeds: a token of each span that decodes, and chunks of those that have more to feed."""
        spans = [span for trajectory in self.running if trajectory.settled for span in trajectory.active]
        unsettled = [trajectory for trajectory in self.running if not trajectory.settled]
        self._feeder.feed_one_each(spans)
        chunks: list[Chunk] = []
        budget = self._prefill_tokens
        for trajectory in sorted(unsettled, key=lambda t: (t.row is None or t.unfed > _SHORT, _rank(t))):
            budget -= self._feeder.feed(trajectory, chunks, budget)
        return spans, chunks

    def _make_room(self) -> tuple[list[Trajectory], int]:
        """Preempt until those who run fit; who had to go, and the pages that the others will allocate."""
        preempted: list[Trajectory] = []
        while (need := self._need()) > self._pool.free_pages + self._prompts.idle_pages:
            if len(self.running) == 1:
                raise PageAccountingError("A trajectory alone does not fit into the pool: validation let it through.")
            victim = max(self.running, key=_rank)
            self.running.remove(victim)
            self._feeder.release(victim)
            victim.preemptions += 1
            self.add(victim)
            preempted.append(victim)
        return preempted, need

    def _admit(self, need: int) -> list[Trajectory]:
        """Admit who fits beside those who run and will allocate `need` pages."""
        admitted: list[Trajectory] = []
        jobs = Counter(trajectory.request.job for trajectory in self.running)
        while len(self.running) < self._max_running and (trajectory := self.waiting.next(jobs)) is not None:
            pages, cached = self._feeder.pages_to_admit(trajectory)
            # A page for each that runs keeps newcomers from being preempted in their first steps.
            need += pages + cached
            if need + len(self.running) > self._pool.free_pages + self._prompts.idle_pages and self.running:
                break
            need -= cached
            self.waiting.pop(trajectory)
            self._feeder.admit(trajectory)
            jobs[trajectory.request.job] += 1
            admitted.append(trajectory)
            self.running.append(trajectory)
        return admitted

    def _need(self) -> int:
        """Pages that those who run will allocate before they have sampled again."""
        settled = [span for trajectory in self.running if trajectory.settled for span in trajectory.active]
        unsettled = [trajectory for trajectory in self.running if not trajectory.settled]
        return self._feeder.pages_needed_by(settled) + self._feeder.pages_needed(unsettled)
