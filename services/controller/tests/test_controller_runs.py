"""Runs through the controller's gRPC face, against the real buffer and a scripted learner and worker."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import grpc
import pytest
import yaml
from scripted_learner import ScriptedLearner
from scripted_worker import Script, work

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr.controller.v1 import controller_pb2 as pb
from npr.controller.v1 import controller_pb2_grpc
from npr.learner.v1 import learner_pb2
from npr_common.config import Addresses
from npr_common.rpc import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    connect,
    rpc_errors,
)
from npr_common.testing.processes import ServiceProcess
from npr_common.testing.servers import running_server
from npr_common.testing.valkey import ValkeyProcess
from npr_controller.service import ControllerService
from npr_controller.settings import ControllerSettings
from npr_controller.state import EventRecord, RunStore, StoreUnavailableError, keys

LEARNING = {"learning_rate": 0.001}
RECIPE = {
    "name": "scripted",
    "model": "bundled:tiny",
    "data": {
        "train": {"kind": "multipart", "split": "train", "count": 40},
        "test": {"multipart": {"kind": "multipart", "split": "test", "count": 6}},
    },
    "decoding": {"max_tokens": 64},
    "evaluation": {"bootstrap_resamples": 100},
    "stages": [
        {"kind": "zero", "steps": 2, "prompts_per_step": 3, "samples_per_prompt": 2, "learning": LEARNING},
        {"kind": "beta", "problems": 5, "tries": 2, "learning": LEARNING},
        {"kind": "npr", "steps": 3, "prompts_per_step": 2, "samples_per_prompt": 2, "learning": LEARNING},
    ],
}


@dataclass
class System:
    """What a test has to do with."""

    controller: controller_pb2_grpc.ControllerServiceAsyncStub
    buffer: buffer_pb2_grpc.BufferServiceAsyncStub
    learner: ScriptedLearner
    service: ControllerService
    run_id: str = field(default_factory=lambda: f"run-{uuid4().hex[:8]}")

    async def create(self, **changes: object) -> pb.Run:
        """Starts the run."""
        recipe_yaml = yaml.safe_dump(RECIPE | changes)
        with rpc_errors():
            answer = await self.controller.CreateRun(
                pb.CreateRunRequest(request_id=self.run_id, recipe_yaml=recipe_yaml)
            )
        return answer.run

    async def rest(self, after_sequence: int = 0) -> list[pb.RunEvent]:
        """All events until the run rests."""
        request = pb.WatchRunRequest(run_id=self.run_id, after_sequence=after_sequence)
        return [message.event async for message in self.controller.WatchRun(request)]

    async def audit(self) -> buffer_pb2.AuditRunResponse:
        """The buffer's own account of the run."""
        answer = await self.buffer.AuditRun(buffer_pb2.AuditRunRequest(run_id=self.run_id))
        assert list(answer.problems) == []
        return answer

    async def report(self) -> dict[str, object]:
        """`report.json`."""
        answer = await self.controller.GetReport(pb.GetReportRequest(run_id=self.run_id))
        return json.loads(answer.report_json)


@pytest.fixture
def make_system(valkey: ValkeyProcess, buffer_address: str, buffer_channel: grpc.aio.Channel):
    """Starts a controller, a learner and a worker; ends them with the test."""

    @asynccontextmanager
    async def make(script: Script | None = None, checkpoint_every: int = 1) -> AsyncIterator[System]:
        learner = ScriptedLearner(buffer_channel, checkpoint_every)
        async with running_server(learner) as learner_address:
            settings = ControllerSettings(
                redis_url=valkey.url, lease_seconds=1.0, patience_seconds=10, stall_seconds=20, redis_retry_seconds=0.01
            )
            service = ControllerService(
                settings, Addresses(buffer_address=buffer_address, learner_address=learner_address)
            )
            worker = asyncio.create_task(work(buffer_channel, script or Script()))
            async with running_server(service) as address, connect(address) as channel:
                stub = controller_pb2_grpc.ControllerServiceStub(channel)
                yield System(stub, buffer_pb2_grpc.BufferServiceStub(buffer_channel), learner, service)
            worker.cancel()
            with suppress(asyncio.CancelledError):
                await worker

    return make


async def test_three_stages_end_with_a_report_and_a_clean_audit(make_system) -> None:
    async with make_system() as system:
        assert (await system.create()).state == pb.RUN_STATE_RUNNING
        events = await system.rest()
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        assert events[-1].kind == "run_finished", events[-1].message
        assert events[-1].run.state == pb.RUN_STATE_COMPLETED
        audit = await system.audit()
        assert dict(audit.consumed_by) == _consumed(system)
        rows = (await system.report())["stages"]
        assert [row["name"] for row in rows] == ["seed", "zero", "beta", "npr"]
        assert [row["parallel_rate"] for row in rows] == [0.0, 0.0, 1.0, 1.0]
        for row in rows:
            assert row["prompts"] == 6
            assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]


async def test_a_model_is_loaded_once_and_every_stage_starts_from_what_it_became(make_system) -> None:
    async with make_system() as system:
        await system.create()
        await system.rest()
        stages = system.learner.stages
        sources = {name: stages[system.run_id, name].request.source for name in ("seed", "zero", "beta", "npr")}
        assert sources["seed"].model == "bundled:tiny"
        seed = stages[system.run_id, "seed"].policy
        assert sources["zero"].policy == seed, "zero and beta start from the recipe's model"
        assert sources["beta"].policy == seed
        assert sources["npr"].policy == stages[system.run_id, "beta"].policy, "npr from the stage before it"


async def test_creating_a_run_again_answers_with_it_and_another_recipe_is_refused(make_system) -> None:
    async with make_system() as system:
        first = await system.create()
        again = await system.create()
        assert again.created_at == first.created_at
        with pytest.raises(AlreadyExistsError, match=r"choose another id, .*npr run --resume"):
            await system.create(seed=7)
        await system.rest()


async def test_bad_recipes_are_refused_with_one_line(make_system) -> None:
    async with make_system() as system:
        with pytest.raises(InvalidArgumentError, match="stepz: unknown key") as caught:
            await system.create(stepz=3)
        assert "stepz" in caught.value.field_violations
        missing = {"train": RECIPE["data"]["train"], "test": {"aime": {"kind": "file", "url": "/no/such.jsonl"}}}
        with pytest.raises(NotFoundError, match=r"/no/such\.jsonl is not there"):
            await system.create(data=missing)
        with pytest.raises(NotFoundError, match="npr runs"), rpc_errors():
            await system.controller.GetRun(pb.GetRunRequest(run_id="nobody"))


async def test_a_missing_model_fails_the_run_with_the_learners_sentence(make_system) -> None:
    async with make_system() as system:
        await system.create(model="missing")
        last = (await system.rest())[-1]
        assert (last.kind, last.run.state) == ("failed", pb.RUN_STATE_FAILED)
        assert last.run.error == "no model at missing: check the path"


async def test_a_driver_that_loses_its_redis_at_every_transition_still_does_everything_once(
    make_system, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each transition is lost twice: once before it is written, once after it was written and before the answer."""
    interrupted: dict[str, int] = {}
    transition = RunStore.transition

    async def flaky(self: RunStore, run_id: str, event: EventRecord, **changes: object) -> int:
        facts: Mapping[str, object] = changes.get("facts") or {}
        key = f"{event.kind}/{event.run.stage}/{event.run.step}/{'-'.join(facts)}"
        interrupted[key] = interrupted.get(key, 0) + 1
        if interrupted[key] == 1:
            raise StoreUnavailableError("lost before the write")
        sequence = await transition(self, run_id, event, **changes)
        if interrupted[key] == 2:
            raise StoreUnavailableError("lost after the write")
        return sequence

    monkeypatch.setattr(RunStore, "transition", flaky)
    async with make_system() as system:
        await system.create()
        events = await system.rest()
        assert events[-1].run.state == pb.RUN_STATE_COMPLETED, events[-1].message
        assert len(interrupted) >= 20
        assert len(system.learner.trained) == len(set(system.learner.trained)) == 2 + 1 + 3
        assert dict((await system.audit()).consumed_by) == _consumed(system)


async def test_groups_without_spread_are_replaced_within_the_rounds(make_system) -> None:
    """The first round of every step of zero has one group of equal rewards; the second round replaces it."""

    def correct(group: buffer_pb2.Group, index: int) -> bool:
        flat = group.channel.startswith("zero/train") and group.group_id.endswith("r0-0")
        return flat or index % 2 == 0

    async with make_system(Script(correct=correct)) as system:
        await system.create(stages=RECIPE["stages"][:1])
        events = await system.rest()
        assert events[-1].run.state == pb.RUN_STATE_COMPLETED
        resampled = [event for event in events if event.kind == "resampled"]
        assert [event.metrics["groups_without_spread"] for event in resampled] == [1, 1]
        for _, _, group_ids in system.learner.trained:
            assert [group_id.rsplit("-v")[1].split("-", 1)[1] for group_id in group_ids] == ["r0-1", "r0-2", "r1-0"]
        assert (await system.audit()).counts.discarded == 2


async def test_a_stage_without_any_spread_fails_after_its_rounds(make_system) -> None:
    async with make_system(Script(correct=lambda *_: True)) as system:
        await system.create(stages=RECIPE["stages"][:1])
        last = (await system.rest())[-1]
        assert last.run.state == pb.RUN_STATE_FAILED
        assert "zero step 0: every group had equal rewards in 3 rounds" in last.run.error


async def test_the_run_goes_back_when_the_learner_lost_steps(make_system) -> None:
    """The learner comes back from the checkpoint after step 1 when asked for step 3: step 2 is done again."""
    stage = RECIPE["stages"][0] | {"steps": 4}
    async with make_system(checkpoint_every=2) as system:
        crashes = iter([True])

        async def crash_once(request: learner_pb2.TrainStepRequest) -> None:
            if request.step == 3 and next(crashes, False):
                system.learner.crash()

        system.learner.before_step = crash_once
        await system.create(stages=[stage])
        events = await system.rest()
        assert events[-1].run.state == pb.RUN_STATE_COMPLETED, events[-1].run.error
        went_back = [event for event in events if event.kind == "went_back"]
        assert [event.run.step for event in went_back] == [2]
        audit = await system.audit()
        assert dict(audit.consumed_by) == _consumed(system)
        assert audit.counts.discarded > 0, "the groups of the lost policy are set aside, never trained on"


GIVEN = {"kind": "multiverse", "dataset_url": "given.jsonl", "learning": LEARNING}


async def test_a_policy_that_seldom_forks_stops_the_run_before_stage_three(make_system) -> None:
    async with make_system(Script(forks=lambda *_: False)) as system:
        await system.create(stages=[GIVEN, RECIPE["stages"][2]])
        last = (await system.rest())[-1]
        assert last.run.state == pb.RUN_STATE_FAILED
        assert "multiverse forks in 0.0% of its responses and npr needs 95%" in last.run.error
        assert ("npr", 0) not in {(stage, step) for stage, step, _ in system.learner.trained}


async def test_form_that_drifts_past_the_bound_stops_stage_three(make_system) -> None:
    """The step at which the rate has been past the bound for `malformed_steps` batches is never trained."""
    async with make_system(Script(well_formed=lambda *_: False)) as system:
        guard = {"max_malformed_rate": 0.9, "malformed_steps": 2}
        await system.create(stages=[GIVEN, RECIPE["stages"][2]], guard=guard)
        last = (await system.rest())[-1]
        assert last.run.state == pb.RUN_STATE_FAILED
        assert "npr step 1: 100% of the responses are malformed" in last.run.error
        assert [step for stage, step, _ in system.learner.trained if stage == "npr"] == [0]


async def test_a_learner_that_computes_another_policy_stops_the_run(make_system) -> None:
    """The bound travels to the stages of reinforcement learning; what the learner says is the run's error."""

    async def drifts(request: learner_pb2.TrainStepRequest) -> None:
        raise FailedPreconditionError("they do not compute the same policy", reason="LOG_PROB_DRIFT")

    async with make_system() as system:
        system.learner.before_step = drifts
        await system.create(stages=[GIVEN, RECIPE["stages"][2]], guard={"max_log_prob_drift_mean": 0.25})
        last = (await system.rest())[-1]
        assert last.run.state == pb.RUN_STATE_FAILED
        assert "they do not compute the same policy" in last.run.error
        options = {name: json.loads(stage.request.options_json) for (_, name), stage in system.learner.stages.items()}
        assert options["npr"]["max_log_prob_drift_mean"] == 0.25
        assert "max_log_prob_drift_mean" not in options["multiverse"]


async def test_rejection_sampling_retries_only_what_was_not_accepted(make_system) -> None:
    """Round 0 accepts the even problems; round 1 the others."""

    def correct(group: buffer_pb2.Group, index: int) -> bool:
        if not group.channel.startswith("beta/sample"):
            return index % 2 == 0
        problem = int(group.group_id.rsplit("-", 1)[1])
        return problem % 2 == 0 or group.channel.endswith("/1")

    async with make_system(Script(correct=correct)) as system:
        await system.create(stages=RECIPE["stages"][1:2])
        assert (await system.rest())[-1].run.state == pb.RUN_STATE_COMPLETED
        [(_, _, trajectory_ids)] = system.learner.trained
        assert trajectory_ids == ("beta-r0-0/0", "beta-r0-2/0", "beta-r0-4/0", "beta-r1-1/0", "beta-r1-3/0")
        audit = await system.audit()
        assert (audit.counts.discarded, audit.consumed_by["beta/sft"]) == (2, 5)


async def test_a_stage_without_steps_tells_where_it_is(make_system) -> None:
    async with make_system() as system:
        await system.create(stages=[{"kind": "beta", "problems": 5, "tries": 2, "learning": LEARNING}])
        events = await system.rest()
    first = {event.kind: event for event in reversed(events)}
    assert re.fullmatch(
        r"sampling, round 1 of \d: \d+ of \d+ trajectories, \d+ accepted so far", first["sampling"].message
    )
    assert {"trajectories", "trajectories_expected", "accepted"} <= first["sampling"].metrics.keys()
    assert first["fine_tuning"].message == "fine-tuning, update 1 of 2, loss 1"
    assert sum(event.kind == "fine_tuning" for event in events) == 1, "a line every few seconds"


async def test_a_stopped_run_rests_and_resumes_where_it_was(make_system) -> None:
    gate = asyncio.Event()
    async with make_system() as system:

        async def gated(_: learner_pb2.TrainStepRequest) -> None:
            await gate.wait()

        system.learner.before_step = gated
        await system.create(stages=RECIPE["stages"][:1])
        async for message in system.controller.WatchRun(pb.WatchRunRequest(run_id=system.run_id)):
            if message.event.run.phase == "train":
                break
        stopped = (await system.controller.StopRun(pb.StopRunRequest(run_id=system.run_id))).run
        assert stopped.state == pb.RUN_STATE_STOPPED
        events = await system.rest()
        assert events[-1].kind == "stopped"
        gate.set()
        resumed = (await system.controller.ResumeRun(pb.ResumeRunRequest(run_id=system.run_id))).run
        assert resumed.state == pb.RUN_STATE_RUNNING
        later = await system.rest(events[-1].sequence)
        assert (later[0].kind, later[-1].kind) == ("resumed", "run_finished")
        assert [step for _, step, _ in system.learner.trained] == [0, 1]


async def test_an_evaluation_is_a_run_of_one_row(make_system) -> None:
    async with make_system() as system:
        recipe = {key: value for key, value in RECIPE.items() if key != "stages"}
        recipe["evaluation"] = {"samples_per_problem": 4, "pass_at": [1, 2, 4], "visibility": "parallel"}
        request = pb.CreateEvaluationRequest(request_id=system.run_id, recipe_yaml=yaml.safe_dump(recipe))
        await system.controller.CreateEvaluation(request)
        assert (await system.rest())[-1].run.state == pb.RUN_STATE_COMPLETED
        [row] = (await system.report())["stages"]
        assert (row["name"], row["accuracy"], row["best_at_k"]) == ("evaluation", 0.5, 1.0)
        assert row["pass_at"]["1"] == pytest.approx(0.5)
        assert row["pass_at"]["2"] == pytest.approx(1 - 1 / 6)
        with_stages = pb.CreateEvaluationRequest(request_id="other", recipe_yaml=yaml.safe_dump(RECIPE))
        with pytest.raises(InvalidArgumentError, match="no stages"), rpc_errors():
            await system.controller.CreateEvaluation(with_stages)


async def test_kill_9_of_the_leading_process_loses_nothing(
    make_system, valkey: ValkeyProcess, buffer_address: str, tmp_path: Path
) -> None:
    """A controller process is killed after each of its first events of every kind; another one goes on each time."""
    async with make_system() as system:
        await system.service.drain()  # this replica leaves the lead to the processes
        async with running_server(system.learner) as learner_address:
            environment = {
                "NPR_CONTROLLER_REDIS_URL": valkey.url,
                "NPR_CONTROLLER_LEASE_SECONDS": "0.5",
                "NPR_BUFFER_ADDRESS": buffer_address,
                "NPR_LEARNER_ADDRESS": learner_address,
            }
            seen: set[str] = set()
            kills = 0
            finished = False
            process = ServiceProcess("npr_controller", tmp_path, environment)
            while not finished:
                await asyncio.to_thread(process.start)
                async with connect(process.address) as channel:
                    finished = await _until_new_event(system.run_id, channel, seen)
                process.kill()
                kills += 1
        assert kills >= 7
        assert len(system.learner.trained) == len(set(system.learner.trained)) == 6
        assert dict((await system.audit()).consumed_by) == _consumed(system)


async def _until_new_event(run_id: str, channel: grpc.aio.Channel, seen: set[str]) -> bool:
    """Watches the run until an event of a kind that was not `seen`; True when the run has finished."""
    stub = controller_pb2_grpc.ControllerServiceStub(channel)
    await stub.CreateRun(
        pb.CreateRunRequest(request_id=run_id, recipe_yaml=yaml.safe_dump(RECIPE)), wait_for_ready=True
    )
    async for message in stub.WatchRun(pb.WatchRunRequest(run_id=run_id)):
        if message.event.kind not in seen:
            seen.add(message.event.kind)
            return message.event.kind == "run_finished"
    return True


def _consumed(system: System) -> dict[str, int]:
    """What must have been consumed: every step's groups by it, every evaluation's by it."""
    expected: dict[str, int] = {}
    for (run_id, name), stage in system.learner.stages.items():
        if run_id != system.run_id:
            continue
        expected[f"eval/{name}"] = 6
        for step, groups in enumerate(stage.groups):
            expected[f"{name}/step/{step}"] = len(groups)
        if name == "beta":
            expected["beta/sft"] = 5
    return expected


def test_controller_keys_share_one_slot() -> None:
    names = [keys.LEADER, keys.RUNS, keys.run_key("a"), keys.facts_key("a"), keys.events_key("b")]
    assert {name.split("{")[1].split("}")[0] for name in names} == {"controller"}
