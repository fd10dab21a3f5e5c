"""Runs: the three stages, baselines and evaluations."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass

from npr.controller.v1 import controller_pb2, controller_pb2_grpc
from npr_client.sdk.channels import Channels

SERVICE = "controller"


@dataclass(frozen=True)
class Report:
    """A run's report so far, as the two files that are kept of it."""

    json: str
    html: str


class Runs:
    """Calls of the controller."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    @property
    def _stub(self) -> controller_pb2_grpc.ControllerServiceAsyncStub:
        return controller_pb2_grpc.ControllerServiceStub(self._channels.to(SERVICE))

    async def create(self, run_id: str, recipe_yaml: str) -> controller_pb2.Run:
        """Starts a run; a repeat with the same id answers how it stands."""
        request = controller_pb2.CreateRunRequest(request_id=run_id, recipe_yaml=recipe_yaml)
        return (await self._channels.call(SERVICE, lambda: self._stub.CreateRun(request))).run

    async def evaluate(self, run_id: str, recipe_yaml: str) -> controller_pb2.Run:
        """Starts a run of one evaluation."""
        request = controller_pb2.CreateEvaluationRequest(request_id=run_id, recipe_yaml=recipe_yaml)
        return (await self._channels.call(SERVICE, lambda: self._stub.CreateEvaluation(request))).run

    async def get(self, run_id: str) -> controller_pb2.Run:
        """How the run stands. `NotFoundError` for an unknown one."""
        request = controller_pb2.GetRunRequest(run_id=run_id)
        return (await self._channels.call(SERVICE, lambda: self._stub.GetRun(request))).run

    async def watch(self, run_id: str, after_sequence: int = 0) -> AsyncIterator[controller_pb2.RunEvent]:
        """The run's events, past and live, in order, each once, until it ends or pauses."""
        last = after_sequence

        def open_stream() -> AsyncIterable[controller_pb2.WatchRunResponse]:
            return self._stub.WatchRun(controller_pb2.WatchRunRequest(run_id=run_id, after_sequence=last))

        async for response in self._channels.stream(SERVICE, open_stream):
            if response.event.sequence > last:
                last = response.event.sequence
                yield response.event

    async def stop(self, run_id: str) -> controller_pb2.Run:
        """Pauses the run."""
        request = controller_pb2.StopRunRequest(run_id=run_id)
        return (await self._channels.call(SERVICE, lambda: self._stub.StopRun(request))).run

    async def resume(self, run_id: str) -> controller_pb2.Run:
        """Goes on with a stopped or failed run."""
        request = controller_pb2.ResumeRunRequest(run_id=run_id)
        return (await self._channels.call(SERVICE, lambda: self._stub.ResumeRun(request))).run

    async def list(self, limit: int = 0) -> list[controller_pb2.Run]:
        """Runs, newest first; 0 means the service's own limit."""
        request = controller_pb2.ListRunsRequest(page_size=limit)
        return list((await self._channels.call(SERVICE, lambda: self._stub.ListRuns(request))).runs)

    async def report(self, run_id: str) -> Report:
        """The report of what has been measured so far."""
        request = controller_pb2.GetReportRequest(run_id=run_id)
        answer = await self._channels.call(SERVICE, lambda: self._stub.GetReport(request))
        return Report(json=answer.report_json, html=answer.report_html)
