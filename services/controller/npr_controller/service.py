"""The gRPC face of the controller. Every replica answers every call; the leader's supervisor does the work."""

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from npr.controller.v1 import controller_pb2, controller_pb2_grpc
from npr_common.config import Addresses
from npr_common.dialects import load_dialect
from npr_common.rpc import AlreadyExistsError, InvalidArgumentError, connect
from npr_controller.clients import BufferClient, LearnerClient
from npr_controller.recipe import Recipe, parse_recipe
from npr_controller.report import build_report, render_html
from npr_controller.settings import ControllerSettings
from npr_controller.stages.context import Limits, Problems, RunContext
from npr_controller.stages.flow import drive
from npr_controller.state import EventKind, EventRecord, RunRecord, RunState, RunStore, connect_redis, keys, now
from npr_controller.state.journal import Journal
from npr_controller.state.leader import LeaderLease
from npr_controller.supervisor import Supervisor
from npr_controller.tasks import end

if TYPE_CHECKING:  # grpc's classes are generic in their stubs only
    Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)

_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Notices wake a watcher; this bounds how long a lost one goes unseen.
_RECHECK_SECONDS = 5.0


class ControllerService(controller_pb2_grpc.ControllerServiceServicer):
    """Runs, their events and their reports."""

    name = "controller"
    grpc_names = (controller_pb2.DESCRIPTOR.services_by_name["ControllerService"].full_name,)

    def __init__(self, settings: ControllerSettings, addresses: Addresses) -> None:
        self._settings = settings
        self._store = RunStore(connect_redis(settings.redis_url))
        self._lease = LeaderLease(self._store, settings.lease_seconds)
        self._supervisor = Supervisor(self._store, self._lease, self._drive, settings.redis_retry_seconds)
        self._addresses = addresses
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._leading: asyncio.Task[None] | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(self, server)

    async def start(self) -> None:
        """Connects, and begins to lead or to wait for the lease."""
        self._channels = {
            "buffer": connect(self._addresses.buffer_address),
            "learner": connect(self._addresses.learner_address),
        }
        self._leading = asyncio.create_task(self._supervisor.run(), name="supervisor")
        self._leading.add_done_callback(_end_process_on_fault)

    async def drain(self) -> None:
        """Stops driving (what is in flight is durable already) and lets another replica lead at once."""
        if self._leading is not None:
            await end([self._leading])
        await self._lease.release()
        for channel in self._channels.values():
            await channel.close()
        await self._store.redis.aclose()

    async def CreateRun(  # noqa: N802 - the contract's name
        self, request: controller_pb2.CreateRunRequest, context: "Context"
    ) -> controller_pb2.CreateRunResponse:
        """Validates recipe and data, and adds the run."""
        record = await self._created(request.request_id, request.recipe_yaml)
        return controller_pb2.CreateRunResponse(run=record.to_proto())

    async def CreateEvaluation(  # noqa: N802
        self, request: controller_pb2.CreateEvaluationRequest, context: "Context"
    ) -> controller_pb2.CreateEvaluationResponse:
        """A run without stages."""
        if parse_recipe(request.recipe_yaml).stages:
            raise InvalidArgumentError("an evaluation has no stages: leave them out, or use `npr run`")
        record = await self._created(request.request_id, request.recipe_yaml)
        return controller_pb2.CreateEvaluationResponse(run=record.to_proto())

    async def GetRun(  # noqa: N802
        self, request: controller_pb2.GetRunRequest, context: "Context"
    ) -> controller_pb2.GetRunResponse:
        """The run as it stands."""
        return controller_pb2.GetRunResponse(run=(await self._store.get(request.run_id)).to_proto())

    async def ListRuns(  # noqa: N802
        self, request: controller_pb2.ListRunsRequest, context: "Context"
    ) -> controller_pb2.ListRunsResponse:
        """The newest runs."""
        runs = await self._store.newest(request.page_size or 100)
        return controller_pb2.ListRunsResponse(runs=[run.to_proto() for run in runs])

    async def WatchRun(  # noqa: N802
        self, request: controller_pb2.WatchRunRequest, context: "Context"
    ) -> AsyncIterator[controller_pb2.WatchRunResponse]:
        """Events from the log, then live ones, until the run rests and all are told."""
        await self._store.get(request.run_id)
        sequence = request.after_sequence
        async with self._store.listen(keys.event_channel(request.run_id)) as signal_:
            while True:
                # State before events: a run that rests has logged everything it will.
                resting = (await self._store.get(request.run_id)).state is not RunState.RUNNING
                events = await self._store.events(request.run_id, sequence)
                for sequence, event in events:
                    yield controller_pb2.WatchRunResponse(event=event.to_proto(sequence))
                if events:
                    continue
                if resting:
                    return
                await signal_.wait(_RECHECK_SECONDS)

    async def StopRun(  # noqa: N802
        self, request: controller_pb2.StopRunRequest, context: "Context"
    ) -> controller_pb2.StopRunResponse:
        """RUNNING becomes STOPPED; any other state stays."""
        record = await self._moved(request.run_id, {RunState.RUNNING}, RunState.STOPPED, EventKind.STOPPED)
        return controller_pb2.StopRunResponse(run=record.to_proto())

    async def ResumeRun(  # noqa: N802
        self, request: controller_pb2.ResumeRunRequest, context: "Context"
    ) -> controller_pb2.ResumeRunResponse:
        """STOPPED or FAILED becomes RUNNING; any other state stays."""
        resting = {RunState.STOPPED, RunState.FAILED}
        record = await self._moved(request.run_id, resting, RunState.RUNNING, EventKind.RESUMED)
        return controller_pb2.ResumeRunResponse(run=record.to_proto())

    async def GetReport(  # noqa: N802
        self, request: controller_pb2.GetReportRequest, context: "Context"
    ) -> controller_pb2.GetReportResponse:
        """What has been measured so far."""
        record = await self._store.get(request.run_id)
        report = build_report(record, await self._store.facts(request.run_id))
        page = await asyncio.to_thread(render_html, report)
        return controller_pb2.GetReportResponse(report_json=report.model_dump_json(indent=2), report_html=page)

    async def _created(self, run_id: str, recipe_yaml: str) -> RunRecord:
        if not _RUN_ID.fullmatch(run_id):
            raise InvalidArgumentError(
                f"run id {run_id!r}: 1 to 64 letters, digits, `-` and `_`", field_violations={"request_id": "bad form"}
            )
        recipe = parse_recipe(recipe_yaml)
        load_dialect(recipe.dialect)
        await asyncio.to_thread(Problems.open, recipe)
        at = now()
        record = RunRecord(run_id=run_id, recipe=recipe.name, recipe_yaml=recipe_yaml, created_at=at, updated_at=at)
        if await self._store.create(record, EventRecord(at=at, kind=EventKind.CREATED, run=_brief(record))):
            return record
        return await self._same_run(run_id, recipe)

    async def _same_run(self, run_id: str, recipe: Recipe) -> RunRecord:
        record = await self._store.get(run_id)
        if parse_recipe(record.recipe_yaml) != recipe:
            message = (
                f"run {run_id} exists with another recipe: choose another id, or go on with the run that is there by "
                f"`npr run --resume {run_id}`"
            )
            raise AlreadyExistsError(message, reason="RUN_EXISTS")
        return record

    async def _moved(self, run_id: str, sources: set[RunState], target: RunState, kind: EventKind) -> RunRecord:
        record = await self._store.get(run_id)
        if record.state not in sources:
            return record
        at = now()
        after = record.model_copy(update={"state": target, "error": "", "updated_at": at})
        event = EventRecord(at=at, kind=kind, run=_brief(after))
        changes = {"state": target, "error": ""}
        await self._store.transition(run_id, event, expected=sorted(sources), changes=changes)
        return after

    async def _drive(self, journal: Journal) -> None:
        recipe = parse_recipe(journal.run.recipe_yaml)
        patience = self._settings.patience_seconds
        ctx = RunContext(
            recipe=recipe,
            problems=await asyncio.to_thread(Problems.open, recipe),
            journal=journal,
            buffer=BufferClient(self._channels["buffer"], journal.run.run_id, patience),
            learner=LearnerClient(self._channels["learner"], patience),
            limits=Limits(stall_seconds=self._settings.stall_seconds),
        )
        await drive(ctx)


def _brief(record: RunRecord) -> RunRecord:
    """The record without its recipe, as events carry it."""
    return record.model_copy(update={"recipe_yaml": ""})


def _end_process_on_fault(task: "asyncio.Task[None]") -> None:
    """A controller that can't supervise must not look healthy: it ends, and its supervisor's restart policy helps."""
    if task.cancelled():
        return
    log.critical("the supervisor ended; stopping the process", exc_info=task.exception())
    with contextlib.suppress(ProcessLookupError):
        os.kill(os.getpid(), signal.SIGTERM)
