"""The blocking client: the asynchronous one, driven by an event loop of its own.

Not for code that runs inside an event loop; there, use `NprClient` itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from npr.buffer.v1 import buffer_pb2
from npr.controller.v1 import controller_pb2
from npr.reward.v1 import reward_pb2
from npr.rollout.v1 import rollout_pb2
from npr.types.v1 import policy_pb2, prompt_pb2, trajectory_pb2
from npr_client.sdk.addresses import ServiceAddresses
from npr_client.sdk.client import NprClient
from npr_client.sdk.decoding import DecodingOptions
from npr_client.sdk.policies import InFlight

T = TypeVar("T")


class BlockingClient:
    """`NprClient` without `await`. Use it as a context manager."""

    def __init__(self, addresses: ServiceAddresses | None = None) -> None:
        self._runner = asyncio.Runner()
        self._client = self._run(_make(addresses))

    def generate(
        self, prompt: prompt_pb2.Prompt, decoding: DecodingOptions | None = None
    ) -> Iterator[rollout_pb2.GenerateResponse]:
        """See `NprClient.generate`."""
        return self._iterate(self._client.generate(prompt, decoding or DecodingOptions()))

    def serve_policy(
        self, policy: policy_pb2.PolicyRef, in_flight: InFlight = InFlight.DRAIN
    ) -> rollout_pb2.ServePolicyResponse:
        """See `NprClient.serve_policy`."""
        return self._run(self._client.serve_policy(policy, in_flight))

    def submit(
        self,
        prompts: Sequence[prompt_pb2.Prompt],
        decoding: DecodingOptions | None = None,
        *,
        samples_per_prompt: int = 1,
    ) -> str:
        """See `Jobs.submit`."""
        job = self._client.jobs.submit(prompts, decoding or DecodingOptions(), samples_per_prompt=samples_per_prompt)
        return self._run(job)

    def get_job(self, job_id: str) -> rollout_pb2.Job:
        """See `Jobs.get`."""
        return self._run(self._client.jobs.get(job_id))

    def watch_job(self, job_id: str, *, with_trajectories: bool = False) -> Iterator[rollout_pb2.WatchJobResponse]:
        """See `Jobs.watch`."""
        return self._iterate(self._client.jobs.watch(job_id, with_trajectories=with_trajectories))

    def cancel_job(self, job_id: str) -> rollout_pb2.Job:
        """See `Jobs.cancel`."""
        return self._run(self._client.jobs.cancel(job_id))

    def list_jobs(self) -> list[rollout_pb2.Job]:
        """See `Jobs.list`."""
        return self._run(self._client.jobs.list())

    def create_run(self, run_id: str, recipe_yaml: str) -> controller_pb2.Run:
        """See `Runs.create`."""
        return self._run(self._client.runs.create(run_id, recipe_yaml))

    def watch_run(self, run_id: str, after_sequence: int = 0) -> Iterator[controller_pb2.RunEvent]:
        """See `Runs.watch`."""
        return self._iterate(self._client.runs.watch(run_id, after_sequence))

    def list_runs(self) -> list[controller_pb2.Run]:
        """See `Runs.list`."""
        return self._run(self._client.runs.list())

    def verify(self, items: Sequence[reward_pb2.ScoreItem]) -> list[trajectory_pb2.Score]:
        """See `Verification.score`."""
        return self._run(self._client.verification.score(items))

    def trajectory(self, run_id: str, trajectory_id: str) -> buffer_pb2.GetTrajectoryResponse:
        """See `Trajectories.get`."""
        return self._run(self._client.trajectories.get(run_id, trajectory_id))

    def close(self) -> None:
        """Closes channels and loop."""
        self._run(self._client.close())
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def _iterate(self, stream: AsyncIterator[T]) -> Iterator[T]:
        try:
            while True:
                try:
                    yield self._run(_next(stream))
                except StopAsyncIteration:
                    return
        finally:
            self._run(_close(stream))


async def _make(addresses: ServiceAddresses | None) -> NprClient:
    return NprClient(addresses) if addresses is not None else NprClient.connect()


async def _next(stream: AsyncIterator[T]) -> T:
    return await anext(stream)


async def _close(stream: AsyncIterator[Any]) -> None:
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()
