"""A learner without a model that keeps the contract of learner.proto: frontiers, stored results, acknowledgements.

It refuses what the real one must refuse: steps out of order, and groups of another policy version.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr.learner.v1 import learner_pb2, learner_pb2_grpc
from npr.types.v1 import policy_pb2
from npr_common.rpc import FailedPreconditionError, NotFoundError

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class _Stage:
    request: learner_pb2.StartStageRequest
    first: policy_pb2.PolicyRef
    results: list[learner_pb2.StepResult] = field(default_factory=list)
    groups: list[list[str]] = field(default_factory=list)
    durable: int = 0

    @property
    def policy(self) -> policy_pb2.PolicyRef:
        return self.results[-1].policy if self.results else self.first


class ScriptedLearner(learner_pb2_grpc.LearnerServiceServicer):
    """Keeps frontiers in memory; `checkpoint_every` > 1 makes the steps between checkpoints losable."""

    name = "learner"
    grpc_names = (learner_pb2.DESCRIPTOR.services_by_name["LearnerService"].full_name,)

    def __init__(self, buffer: grpc.aio.Channel, checkpoint_every: int = 1) -> None:
        self.before_step: Callable[[learner_pb2.TrainStepRequest], Awaitable[None]] = _at_once
        self._buffer = buffer_pb2_grpc.BufferServiceStub(buffer)
        self._checkpoint_every = checkpoint_every
        self._versions: dict[str, int] = {}
        # A killed controller's call may still run when its successor asks again: one change at a time.
        self._changing = asyncio.Lock()
        self.stages: dict[tuple[str, str], _Stage] = {}
        self.trained: list[tuple[str, int, tuple[str, ...]]] = []

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        learner_pb2_grpc.add_LearnerServiceServicer_to_server(self, server)

    async def start(self) -> None:
        """Nothing to load."""

    async def drain(self) -> None:
        """Nothing in flight."""

    def crash(self) -> None:
        """Comes back from its checkpoints: the steps behind them are gone."""
        for stage in self.stages.values():
            del stage.results[stage.durable :]
            del stage.groups[stage.durable :]

    async def StartStage(
        self, request: learner_pb2.StartStageRequest, context: "Context"
    ) -> learner_pb2.StartStageResponse:
        """Idempotent by run and stage."""
        if request.source.model == "missing":
            raise NotFoundError("no model at missing: check the path")
        key = (request.run_id, request.stage)
        if key not in self.stages:
            self.stages[key] = _Stage(request, self._publish(request.run_id))
        stage = self.stages[key]
        return learner_pb2.StartStageResponse(policy=stage.policy, next_step=len(stage.results))

    async def TrainStep(
        self, request: learner_pb2.TrainStepRequest, context: "Context"
    ) -> AsyncIterator[learner_pb2.TrainStepResponse]:
        """One step, or its stored result."""
        await self.before_step(request)
        stage = self.stages[request.run_id, request.stage]
        frontier = len(stage.results)
        if request.step > frontier:
            raise FailedPreconditionError("not the next step", metadata={"next_step": str(frontier)})
        yield learner_pb2.TrainStepResponse(progress=learner_pb2.Progress(done=0, total=1, unit="micro-batches"))
        async with self._changing:
            if request.step == len(stage.results):
                await self._step(stage, request)
        yield learner_pb2.TrainStepResponse(result=stage.results[request.step])

    async def FineTune(
        self, request: learner_pb2.FineTuneRequest, context: "Context"
    ) -> AsyncIterator[learner_pb2.FineTuneResponse]:
        """All epochs, or the stored result."""
        stage = self.stages[request.run_id, request.stage]
        for done in (1, 2):
            progress = learner_pb2.Progress(done=done, total=2, unit="updates", metrics={"loss": 1.0 / done})
            yield learner_pb2.FineTuneResponse(progress=progress)
        async with self._changing:
            if not stage.results:
                await self._tune(stage, request)
        yield learner_pb2.FineTuneResponse(result=stage.results[0])

    async def _tune(self, stage: _Stage, request: learner_pb2.FineTuneRequest) -> None:
        if request.group_ids:
            await self._acknowledge(request.run_id, f"{request.stage}/sft", list(request.group_ids))
        policy = self._publish(request.run_id)
        stage.results.append(learner_pb2.StepResult(step=0, policy=policy, metrics={"loss": 0.5}))
        self.trained.append((request.stage, 0, tuple(request.trajectory_ids)))

    async def _step(self, stage: _Stage, request: learner_pb2.TrainStepRequest) -> None:
        versions = {
            scored.trajectory.policy.version
            async for group in self._read(request.run_id, list(request.group_ids))
            for scored in group.trajectories
        }
        if versions != {stage.policy.version}:
            raise FailedPreconditionError(f"rolled out by {versions}, the stage is at {stage.policy.version}")
        # A caller that dies cancels this call: what has been awaited may be repeated, what follows is one piece.
        groups = [*stage.groups, list(request.group_ids)]
        if len(groups) % self._checkpoint_every == 0:
            for step in range(stage.durable, len(groups)):
                await self._acknowledge(request.run_id, f"{request.stage}/step/{step}", groups[step])
            stage.durable = len(groups)
        stage.groups = groups
        metrics = {"loss": 0.1, "entropy": 0.7, "seconds": 0.01}
        policy = self._publish(request.run_id)
        stage.results.append(learner_pb2.StepResult(step=request.step, policy=policy, metrics=metrics))
        self.trained.append((request.stage, request.step, tuple(request.group_ids)))

    async def _acknowledge(self, run_id: str, consumer: str, group_ids: list[str]) -> None:
        [version] = [group.group.policy.version async for group in self._read(run_id, group_ids[:1])]
        await self._buffer.AckGroups(
            buffer_pb2.AckGroupsRequest(run_id=run_id, consumer=consumer, policy_version=version, group_ids=group_ids)
        )

    async def _read(self, run_id: str, group_ids: list[str]) -> AsyncIterator[buffer_pb2.ReadGroupsResponse]:
        request = buffer_pb2.ReadGroupsRequest(run_id=run_id, group_ids=group_ids)
        async for group in self._buffer.ReadGroups(request):
            yield group

    def _publish(self, line: str) -> policy_pb2.PolicyRef:
        version = self._versions.get(line, -1) + 1
        self._versions[line] = version
        digest = hashlib.sha256(f"{line}/{version}".encode()).hexdigest()
        return policy_pb2.PolicyRef(
            line=line, version=version, manifest_url=f"memory://{line}/{version}", digest=digest
        )


async def _at_once(_: learner_pb2.TrainStepRequest) -> None:
    """Nothing to wait for."""
