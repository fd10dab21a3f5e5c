"""Finished trajectories on their way: scored, then appended.

Invariants:
- A trajectory leaves the outbox only when the buffer has it, or says that it never wants it.
- Batches grow with the backlog: one call at a time, of all that has come meanwhile.
- Peers that are away are waited for; the outbox is bounded, so decoding waits too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr.reward.v1 import reward_pb2, reward_pb2_grpc
from npr.types.v1 import trajectory_pb2
from npr_common.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, ResourceExhaustedError
from npr_common.rpc import call_durably

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BATCH = 64
_CAPACITY = 4096
_FULL_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Finished:
    """A trajectory and the group that asked for it. `done` is set when the outbox is through with it."""

    group: buffer_pb2.Group
    trajectory: trajectory_pb2.Trajectory
    done: asyncio.Future[None]


class Outbox:
    """Scores and appends in the background; `run` it as a task."""

    def __init__(
        self,
        buffer: buffer_pb2_grpc.BufferServiceAsyncStub,
        reward: reward_pb2_grpc.RewardServiceAsyncStub,
        peer_wait: float,
    ) -> None:
        self._buffer = buffer
        self._reward = reward
        self._peer_wait = peer_wait
        self._queue: asyncio.Queue[Finished] = asyncio.Queue(_CAPACITY)

    async def deliver(self, group: buffer_pb2.Group, trajectory: trajectory_pb2.Trajectory) -> None:
        """Returns when the trajectory is stored for good, or refused for good.

        Raises:
            UnavailableError: a peer was away for too long.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._queue.put(Finished(group, trajectory, done))
        await done

    async def flush(self) -> None:
        """Returns when everything that was put in is through."""
        await self._queue.join()

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            batch = [await self._queue.get()]
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            for part in _alike(batch):
                await self._send(part)
            for _ in batch:
                self._queue.task_done()

    async def _send(self, items: Sequence[Finished]) -> None:
        """Score and append trajectories of one run, rule and dialect."""
        try:
            scores = await self._score(items)
            await self._append(items, scores)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - it belongs to those who wait, one by one
            for item in items:
                _fail(item.done, error)
        else:
            for item in items:
                if not item.done.done():
                    item.done.set_result(None)

    async def _score(self, items: Sequence[Finished]) -> list[trajectory_pb2.Score]:
        scores = [_unjudged(item) for item in items]
        judged = [index for index, item in enumerate(items) if item.group.prompt.verifier and not _is_refused(item)]
        if not judged:
            return scores
        request = reward_pb2.ScoreRequest(
            items=[_score_item(items[index]) for index in judged],
            rule=items[0].group.reward_rule,
            dialect=items[0].group.dialect,
        )
        try:
            response = await self._patiently(lambda: self._reward.Score(request), "the reward service")
        except InvalidArgumentError as error:
            response = reward_pb2.ScoreResponse(scores=[_unscorable(error.message) for _ in judged])
        for index, score in zip(judged, response.scores, strict=True):
            scores[index] = score
        return scores

    async def _append(self, items: Sequence[Finished], scores: Sequence[trajectory_pb2.Score]) -> None:
        request = buffer_pb2.AppendTrajectoriesRequest(
            run_id=items[0].group.run_id,
            trajectories=[
                trajectory_pb2.ScoredTrajectory(trajectory=item.trajectory, score=score)
                for item, score in zip(items, scores, strict=True)
            ],
        )
        try:
            await self._patiently(lambda: self._buffer.AppendTrajectories(request), "the buffer")
        except (NotFoundError, FailedPreconditionError, InvalidArgumentError) as error:
            # The run was deleted, or one of these is of another policy: refused for good, each on its own.
            if len(items) == 1:
                log.warning("the buffer refuses %s: %s", items[0].trajectory.trajectory_id, error.message)
                return
            for item, score in zip(items, scores, strict=True):
                await self._append([item], [score])

    async def _patiently(self, call: Callable[[], Awaitable[T]], whom: str) -> T:
        """Wait for a peer that is away, and for one that is full."""
        while True:
            try:
                return await call_durably(call, whom=whom, deadline_seconds=self._peer_wait)
            except ResourceExhaustedError as error:
                await asyncio.sleep(error.retry_after_seconds or _FULL_RETRY_SECONDS)


def _alike(batch: Sequence[Finished]) -> list[list[Finished]]:
    parts: dict[tuple[str, int, str], list[Finished]] = {}
    for item in batch:
        parts.setdefault((item.group.run_id, item.group.reward_rule, item.group.dialect), []).append(item)
    return list(parts.values())


def _score_item(item: Finished) -> reward_pb2.ScoreItem:
    prompt = item.group.prompt
    return reward_pb2.ScoreItem(
        response_text=item.trajectory.response_text,
        gold=prompt.gold,
        verifier=prompt.verifier,
        metadata=dict(prompt.metadata),
    )


def _is_refused(item: Finished) -> bool:
    return item.trajectory.outcome == trajectory_pb2.OUTCOME_REFUSED


def _unjudged(item: Finished) -> trajectory_pb2.Score:
    """The score of what no verifier sees; what was refused has no answer that could be wrong."""
    if _is_refused(item):
        return _unscorable(item.trajectory.message)
    return trajectory_pb2.Score(reason="not judged: the prompt names no verifier")


def _unscorable(reason: str) -> trajectory_pb2.Score:
    return trajectory_pb2.Score(verdict=trajectory_pb2.VERDICT_KIND_UNSCORABLE, reason=reason)


def _fail(done: asyncio.Future[None], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
