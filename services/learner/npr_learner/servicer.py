"""The RPCs of the learner.

Invariants:
- One operation at a time changes a stage; readers of a settled frontier don't wait for it.
- An operation ends *settled*: checkpoint durable, policy published, groups acknowledged, answer stored, in this order.
  One that finds its stage unsettled (a crash came between) settles it first; each part may be repeated.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry import trace

from npr.buffer.v1 import buffer_pb2
from npr.learner.v1 import learner_pb2, learner_pb2_grpc
from npr.types.v1 import policy_pb2
from npr_common import telemetry
from npr_common.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from npr_common.telemetry import names
from npr_learner.datasets import read_examples
from npr_learner.experience import Experience
from npr_learner.exports import PolicyExporter
from npr_learner.fine_tuning import FineTuneData, RowMaker, data_of_examples, data_of_groups
from npr_learner.gradient import Observer
from npr_learner.records import StageKey, StageSpec
from npr_learner.requests import require_name, stage_key, stage_spec
from npr_learner.stage import Stage
from npr_learner.stages import Stages, spec_visibility
from npr_learner.worker import Result, Update, Worker

if TYPE_CHECKING:  # grpc's classes are generic in their stubs only
    Context = grpc.aio.ServicerContext[Any, Any]

_MICRO_BATCHES, _UPDATES = "micro-batches", "updates"


class LearnerServicer(learner_pb2_grpc.LearnerServiceServicer):
    """Handlers; all computation and file access happens in the worker's thread."""

    def __init__(self, stages: Stages, experience: Experience, exporter: PolicyExporter, worker: Worker) -> None:
        self._stages = stages
        self._experience = experience
        self._exporter = exporter
        self._worker = worker
        self._changing = asyncio.Lock()
        self._draining = False
        self._step_seconds = telemetry.meter().create_histogram(names.METRIC_LEARNER_STEP_SECONDS, unit="s")
        self._loss = telemetry.meter().create_gauge(names.METRIC_LEARNER_LOSS)

    async def drain(self) -> None:
        """Lets a step finish; fine-tuning stops, to go on from its checkpoint."""
        self._draining = True
        async with self._changing:
            return

    async def StartStage(
        self, request: learner_pb2.StartStageRequest, context: "Context"
    ) -> learner_pb2.StartStageResponse:
        """Starts a stage, or answers with its frontier."""
        spec = stage_spec(request)
        async with self._changing:
            stage = await self._worker.run(lambda: self._stages.start(spec, request.source))
            answer = await self._settle(stage)
            return learner_pb2.StartStageResponse(policy=answer.policy, next_step=stage.record.next_step)

    async def TrainStep(
        self, request: learner_pb2.TrainStepRequest, context: "Context"
    ) -> AsyncIterator[learner_pb2.TrainStepResponse]:
        """Does a step, or answers with its stored result."""
        key = stage_key(request.run_id, request.stage)
        async with self._changing:
            stage = await self._open(key)
            before = await self._settle(stage)
            if request.step >= stage.record.next_step:
                self._require_next(stage, request)
                groups = await self._experience.read(key.run_id, _distinct(request.group_ids))
                async for progress in self._train(stage, before.policy, groups):
                    yield learner_pb2.TrainStepResponse(progress=progress)
                result = await self._settle(stage)
                self._measure(result, stage.record.spec)
            else:
                result = await self._worker.run(lambda: self._stages.answer_of_step(key, request.step))
            yield learner_pb2.TrainStepResponse(result=result)

    async def FineTune(
        self, request: learner_pb2.FineTuneRequest, context: "Context"
    ) -> AsyncIterator[learner_pb2.FineTuneResponse]:
        """Fine-tunes to the end, or answers with the stored result."""
        key = stage_key(request.run_id, request.stage)
        async with self._changing:
            stage = await self._open(key)
            result = await self._settle(stage)
            if not stage.record.fine_tuned:
                _require_objective(stage.record.spec, fine_tuning=True)
                data = await self._data(stage, request)
                async for progress in self._fine_tune(stage, data):
                    yield learner_pb2.FineTuneResponse(progress=progress)
                result = await self._settle(stage)
                self._measure(result, stage.record.spec)
            yield learner_pb2.FineTuneResponse(result=result)

    async def GetStage(self, request: learner_pb2.GetStageRequest, context: "Context") -> learner_pb2.GetStageResponse:
        """The frontier; waits for whoever is changing the stage only where it isn't settled."""
        key = stage_key(request.run_id, request.stage)
        record = await asyncio.to_thread(self._stages.record, key)
        answer = await asyncio.to_thread(self._stages.answer, record)
        if answer is None:
            async with self._changing:
                stage = await self._open(key)
                answer, record = await self._settle(stage), stage.record
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

    async def _open(self, key: StageKey) -> Stage:
        if self._draining:
            raise UnavailableError("the learner is shutting down: call its successor", retry_after_seconds=1.0)
        return await self._worker.run(lambda: self._stages.open(key))

    async def _settle(self, stage: Stage) -> learner_pb2.StepResult:
        """Publishes the frontier's policy, acknowledges its groups, stores and returns its answer."""
        record = stage.record
        answer = await self._worker.run(lambda: self._stages.answer(record))
        if answer is not None:
            return answer
        ref = await self._worker.run(lambda: self._stages.publish(stage))
        if record.last_step is not None:
            for used in record.last_step.used:
                await self._experience.acknowledge(
                    record.spec.key.run_id, record.last_step.consumer, used.policy_version, used.group_ids
                )
        return await self._worker.run(lambda: self._stages.store_answer(record, ref))

    def _require_next(self, stage: Stage, request: learner_pb2.TrainStepRequest) -> None:
        _require_objective(stage.record.spec, fine_tuning=False)
        if request.step > stage.record.next_step:
            raise FailedPreconditionError(
                f"step {request.step} of {stage.record.spec.key} can't be done before step {stage.record.next_step}",
                reason="STEP_NOT_NEXT",
                metadata={"next_step": str(stage.record.next_step)},
            )
        if not request.group_ids:
            raise InvalidArgumentError("a step needs group_ids", field_violations={"group_ids": "empty"})

    async def _train(
        self, stage: Stage, ref: policy_pb2.PolicyRef, groups: Sequence[buffer_pb2.ReadGroupsResponse]
    ) -> AsyncIterator[learner_pb2.Progress]:
        consumer = f"{stage.record.spec.key.stage}/step/{stage.record.next_step}"
        with _span(stage, groups):
            async for progress in self._stream(
                lambda observe: self._stages.train(stage, ref, groups, consumer=consumer, observe=observe),
                _MICRO_BATCHES,
            ):
                yield progress

    async def _fine_tune(self, stage: Stage, data: FineTuneData) -> AsyncIterator[learner_pb2.Progress]:
        consumer = f"{stage.record.spec.key.stage}/fine_tune"

        def work(observe: Observer) -> None:
            self._stages.fine_tune(stage, data, consumer, _unless(lambda: self._draining, observe))

        with _span(stage, ()):
            async for progress in self._stream(work, _UPDATES):
                yield progress

    async def _stream(self, work: Callable[[Observer], None], unit: str) -> AsyncIterator[learner_pb2.Progress]:
        async for event in self._worker.stream(work):
            match event:
                case Update(done, total, metrics):
                    yield learner_pb2.Progress(done=done, total=total, unit=unit, metrics=metrics)
                case Result():
                    return

    async def _data(self, stage: Stage, request: learner_pb2.FineTuneRequest) -> FineTuneData:
        if bool(request.dataset_url) == bool(request.trajectory_ids):
            raise InvalidArgumentError("fine-tuning needs either trajectory_ids or a dataset_url")
        maker = RowMaker(stage.policy, spec_visibility(stage.record.spec))
        if request.dataset_url:
            return await self._worker.run(lambda: data_of_examples(maker, read_examples(request.dataset_url)))
        owners = [trajectory_id.rpartition("/")[0] for trajectory_id in request.trajectory_ids]
        groups = await self._experience.read(request.run_id, _distinct([*owners, *request.group_ids]))
        return await self._worker.run(lambda: data_of_groups(maker, groups, request.trajectory_ids, request.group_ids))

    def _measure(self, result: learner_pb2.StepResult, spec: StageSpec) -> None:
        labels = {names.STAGE: spec.key.stage}
        self._step_seconds.record(result.metrics["seconds"], labels)
        self._loss.set(result.metrics["loss"], labels)


def _unless(stopped: Callable[[], bool], observe: Observer) -> Observer:
    def guarded(done: int, total: int, metrics: Any) -> None:
        if stopped():
            raise UnavailableError("the learner is shutting down: fine-tuning goes on from its last checkpoint")
        observe(done, total, metrics)

    return guarded


def _require_objective(spec: StageSpec, *, fine_tuning: bool) -> None:
    if (spec.objective == learner_pb2.OBJECTIVE_SFT) != fine_tuning:
        call = "TrainStep" if fine_tuning else "FineTune"
        raise FailedPreconditionError(
            f"the objective of stage {spec.key} is {learner_pb2.Objective.Name(_objective(spec))}: call {call}",
            reason="WRONG_OBJECTIVE",
        )


def _objective(spec: StageSpec) -> "learner_pb2.Objective.ValueType":
    return learner_pb2.Objective.ValueType(spec.objective)


def _distinct(ids: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(ids))


def _span(stage: Stage, groups: Sequence[buffer_pb2.ReadGroupsResponse]) -> Any:
    """The training step's span; it links to the trajectories that it uses."""
    parents = {scored.trajectory.traceparent for item in groups for scored in item.trajectories} - {""}
    contexts = [trace.get_current_span(telemetry.context_from(parent)).get_span_context() for parent in sorted(parents)]
    attributes: dict[str, str | int] = {
        names.RUN_ID: stage.record.spec.key.run_id,
        names.STAGE: stage.record.spec.key.stage,
        names.STEP: stage.record.next_step,
        names.POLICY_VERSION: stage.record.policy_version,
    }
    links = [trace.Link(context) for context in contexts]
    return telemetry.tracer().start_as_current_span(names.SPAN_TRAINING_STEP, links=links, attributes=attributes)
