"""The RPCs of the learner.

Invariants:
- One operation at a time changes a stage; readers of a settled frontier don't wait for it.
- An operation ends *settled*: checkpoint durable, policy published, groups acknowledged, answer stored, in this order.
  One that finds its stage unsettled (a crash came between) settles it first; each part may be repeated.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry import trace

from npr.buffer.v1 import buffer_pb2
from npr.learner.v1 import learner_pb2, learner_pb2_grpc
from npr.types.v1 import policy_pb2
from npr_common import telemetry
from npr_common.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from npr_common.telemetry import names
from npr_learner.experience import Experience
from npr_learner.exports import PolicyExporter
from npr_learner.fine_tuning import DatasetSource, FineTuneSource, GroupSource
from npr_learner.frontiers import Frontiers
from npr_learner.ranks import Ranks, Result, Update
from npr_learner.records import StageKey, StageRecord, StageSpec
from npr_learner.requests import require_name, stage_key, stage_spec

if TYPE_CHECKING:  # grpc's classes are generic in their stubs only
    Context = grpc.aio.ServicerContext[Any, Any]

_MICRO_BATCHES, _UPDATES = "micro-batches", "updates"


class LearnerServicer(learner_pb2_grpc.LearnerServiceServicer):
    """Handlers; all computation happens in the ranks."""

    def __init__(self, ranks: Ranks, frontiers: Frontiers, experience: Experience, exporter: PolicyExporter) -> None:
        self._ranks = ranks
        self._frontiers = frontiers
        self._experience = experience
        self._exporter = exporter
        self._changing = asyncio.Lock()
        self._draining = False
        self._step_seconds = telemetry.meter().create_histogram(names.METRIC_LEARNER_STEP_SECONDS, unit="s")
        self._loss = telemetry.meter().create_gauge(names.METRIC_LEARNER_LOSS)

    async def drain(self) -> None:
        """Lets a step finish; fine-tuning stops, to go on from its checkpoint."""
        self._draining = True
        async with self._changing:
            await self._ranks.close()

    async def StartStage(
        self, request: learner_pb2.StartStageRequest, context: "Context"
    ) -> learner_pb2.StartStageResponse:
        """Starts a stage, or answers with its frontier."""
        spec, source = stage_spec(request), request.source
        async with self._changing:
            record = await self._ranks.run(lambda stages, _: stages.start(spec, source))
            answer = await self._settle(record)
            return learner_pb2.StartStageResponse(policy=answer.policy, next_step=record.next_step)

    async def TrainStep(
        self, request: learner_pb2.TrainStepRequest, context: "Context"
    ) -> AsyncIterator[learner_pb2.TrainStepResponse]:
        """Does a step, or answers with its stored result."""
        key = stage_key(request.run_id, request.stage)
        async with self._changing:
            record = await self._open(key)
            before = await self._settle(record)
            if request.step >= record.next_step:
                _require_next(record, request)
                groups = await self._experience.read(key.run_id, _distinct(request.group_ids))
                async for event in self._train(record, before.policy, groups):
                    match event:
                        case Update():
                            yield learner_pb2.TrainStepResponse(progress=_progress(event, _MICRO_BATCHES))
                        case Result(done):
                            result = await self._settle(done)
                self._measure(result, record.spec)
            else:
                result = await asyncio.to_thread(self._frontiers.answer_of_step, key, request.step)
            yield learner_pb2.TrainStepResponse(result=result)

    async def FineTune(
        self, request: learner_pb2.FineTuneRequest, context: "Context"
    ) -> AsyncIterator[learner_pb2.FineTuneResponse]:
        """Fine-tunes to the end, or answers with the stored result."""
        key = stage_key(request.run_id, request.stage)
        async with self._changing:
            record = await self._open(key)
            result = await self._settle(record)
            if not record.fine_tuned:
                _require_objective(record.spec, fine_tuning=True)
                source = await self._source(request)
                async for event in self._fine_tune(record, source):
                    match event:
                        case Update():
                            yield learner_pb2.FineTuneResponse(progress=_progress(event, _UPDATES))
                        case Result(done):
                            result = await self._settle(done)
                self._measure(result, record.spec)
            yield learner_pb2.FineTuneResponse(result=result)

    async def GetStage(self, request: learner_pb2.GetStageRequest, context: "Context") -> learner_pb2.GetStageResponse:
        """The frontier; waits for whoever is changing the stage only where it isn't settled."""
        key = stage_key(request.run_id, request.stage)
        record = await asyncio.to_thread(self._frontiers.record, key)
        answer = await asyncio.to_thread(self._frontiers.answer, record)
        if answer is None:
            async with self._changing:
                record = await self._open(key)
                answer = await self._settle(record)
        return learner_pb2.GetStageResponse(
            policy=answer.policy, next_step=record.next_step, fine_tuned=record.fine_tuned
        )

    async def ExportPolicy(
        self, request: learner_pb2.ExportPolicyRequest, context: "Context"
    ) -> learner_pb2.ExportPolicyResponse:
        """Writes a policy as a folder."""
        name = require_name("name", request.name)
        return learner_pb2.ExportPolicyResponse(
            url=await asyncio.to_thread(self._exporter.export, request.policy, name)
        )

    async def _open(self, key: StageKey) -> StageRecord:
        if self._draining:
            raise UnavailableError("the learner is shutting down: call its successor", retry_after_seconds=1.0)
        return await self._ranks.run(lambda stages, _: stages.open(key))

    async def _settle(self, record: StageRecord) -> learner_pb2.StepResult:
        """Publishes the frontier's policy, acknowledges its groups, stores and returns its answer."""
        answer = await asyncio.to_thread(self._frontiers.answer, record)
        if answer is not None:
            return answer
        key = record.spec.key
        ref = await self._ranks.run(lambda stages, _: stages.publish(key))
        if record.last_step is not None:
            for used in record.last_step.used:
                await self._experience.acknowledge(
                    key.run_id, record.last_step.consumer, used.policy_version, used.group_ids
                )
        return await asyncio.to_thread(self._frontiers.store_answer, record, ref)

    async def _train(
        self, record: StageRecord, ref: policy_pb2.PolicyRef, groups: Sequence[buffer_pb2.ReadGroupsResponse]
    ) -> AsyncGenerator[Update | Result[StageRecord], None]:
        key = record.spec.key
        consumer = f"{key.stage}/step/{record.next_step}"
        work = self._ranks.stream(
            lambda stages, observe: stages.train(key, ref, groups, consumer=consumer, observe=observe)
        )
        with _span(record, groups):
            async with aclosing(work):
                async for event in work:
                    yield event

    async def _fine_tune(
        self, record: StageRecord, source: FineTuneSource
    ) -> AsyncGenerator[Update | Result[StageRecord], None]:
        key = record.spec.key
        consumer = f"{key.stage}/fine_tune"
        work = self._ranks.stream(lambda stages, observe: stages.fine_tune(key, source, consumer, observe))
        with _span(record, ()):
            async with aclosing(work):
                async for event in work:
                    if self._draining:
                        raise UnavailableError(
                            "the learner is shutting down: fine-tuning goes on from its last checkpoint"
                        )
                    yield event

    async def _source(self, request: learner_pb2.FineTuneRequest) -> FineTuneSource:
        if bool(request.dataset_url) == bool(request.trajectory_ids):
            raise InvalidArgumentError("fine-tuning needs either trajectory_ids or a dataset_url")
        if request.dataset_url:
            return DatasetSource(request.dataset_url)
        owners = [trajectory_id.rpartition("/")[0] for trajectory_id in request.trajectory_ids]
        groups = await self._experience.read(request.run_id, _distinct([*owners, *request.group_ids]))
        return GroupSource(groups, frozenset(request.trajectory_ids), frozenset(request.group_ids))

    def _measure(self, result: learner_pb2.StepResult, spec: StageSpec) -> None:
        labels = {names.STAGE: spec.key.stage}
        self._step_seconds.record(result.metrics["seconds"], labels)
        self._loss.set(result.metrics["loss"], labels)


def _progress(update: Update, unit: str) -> learner_pb2.Progress:
    return learner_pb2.Progress(done=update.done, total=update.total, unit=unit, metrics=update.metrics)


def _require_next(record: StageRecord, request: learner_pb2.TrainStepRequest) -> None:
    _require_objective(record.spec, fine_tuning=False)
    if request.step > record.next_step:
        raise FailedPreconditionError(
            f"step {request.step} of {record.spec.key} can't be done before step {record.next_step}",
            reason="STEP_NOT_NEXT",
            metadata={"next_step": str(record.next_step)},
        )
    if not request.group_ids:
        raise InvalidArgumentError("a step needs group_ids", field_violations={"group_ids": "empty"})


def _require_objective(spec: StageSpec, *, fine_tuning: bool) -> None:
    if (spec.objective == learner_pb2.OBJECTIVE_SFT) != fine_tuning:
        call = "TrainStep" if fine_tuning else "FineTune"
        raise FailedPreconditionError(
            f"the objective of stage {spec.key} is {learner_pb2.Objective.Name(spec.objective_value)}: call {call}",
            reason="WRONG_OBJECTIVE",
        )


def _distinct(ids: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(ids))


def _span(record: StageRecord, groups: Sequence[buffer_pb2.ReadGroupsResponse]) -> Any:
    """The training step's span; it links to the trajectories that it uses."""
    parents = {scored.trajectory.traceparent for item in groups for scored in item.trajectories} - {""}
    contexts = [trace.get_current_span(telemetry.context_from(parent)).get_span_context() for parent in sorted(parents)]
    attributes: dict[str, str | int] = {
        names.RUN_ID: record.spec.key.run_id,
        names.STAGE: record.spec.key.stage,
        names.STEP: record.next_step,
        names.POLICY_VERSION: record.policy_version,
    }
    links = [trace.Link(context) for context in contexts]
    return telemetry.tracer().start_as_current_span(names.SPAN_TRAINING_STEP, links=links, attributes=attributes)
