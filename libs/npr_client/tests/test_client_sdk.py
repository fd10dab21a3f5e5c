"""The SDK against gRPC servers that go away and come back."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from npr.controller.v1 import controller_pb2, controller_pb2_grpc
from npr.reward.v1 import reward_pb2, reward_pb2_grpc
from npr.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from npr.types.v1 import policy_pb2, sampling_pb2, trajectory_pb2
from npr_client.sdk import (
    BlockingClient,
    BranchShare,
    BudgetOptions,
    DecodingOptions,
    Exhaustion,
    InFlight,
    NprClient,
    ServiceAddresses,
    prompts_from_jsonl,
    text_prompt,
)
from npr_client.stack import StateDir
from npr_common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from npr_common.rpc import ServerSettings
from npr_common.testing.servers import running_server

EVENTS = 6


class Controller(controller_pb2_grpc.ControllerServiceServicer):
    """Tells events from where the caller is; drops the connection after two events while `drops` lasts."""

    name = "controller"
    grpc_names = ("npr.controller.v1.ControllerService",)

    def __init__(self, drops: int) -> None:
        self.drops = drops
        self.asked_from: list[int] = []

    def register(self, server: grpc.aio.Server) -> None:
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(self, server)

    async def start(self) -> None:
        """Nothing to load."""

    async def drain(self) -> None:
        """Nothing in flight."""

    async def WatchRun(self, request: controller_pb2.WatchRunRequest, _: Any) -> AsyncIterator[Any]:
        self.asked_from.append(request.after_sequence)
        for sequence in range(request.after_sequence + 1, EVENTS + 1):
            if self.drops and sequence > request.after_sequence + 2:
                self.drops -= 1
                raise UnavailableError("going away")
            yield controller_pb2.WatchRunResponse(event=controller_pb2.RunEvent(sequence=sequence))


async def test_watching_a_run_goes_on_where_it_was() -> None:
    controller = Controller(drops=2)
    async with running_server(controller) as address, NprClient(ServiceAddresses({"controller": address})) as client:
        sequences = [event.sequence async for event in client.runs.watch("r")]

    assert sequences == list(range(1, EVENTS + 1))
    assert controller.asked_from == [0, 2, 4]


async def test_watching_waits_for_a_server_that_is_restarted() -> None:
    async with running_server(Controller(drops=0)) as address:
        pass  # it is gone again; only its address is known
    client = NprClient(ServiceAddresses({"controller": address}))
    watching = asyncio.create_task(_sequences(client))
    with pytest.raises(TimeoutError):  # nobody is there
        await asyncio.wait_for(asyncio.shield(watching), 0.3)
    async with running_server(Controller(drops=0), ServerSettings(listen=address, drain_seconds=1.0)):
        assert await watching == list(range(1, EVENTS + 1))
    await client.close()


async def _sequences(client: NprClient) -> list[int]:
    return [event.sequence async for event in client.runs.watch("r")]


async def test_patience_ends_with_whom_was_waited_for() -> None:
    async with running_server(Controller(drops=0)) as address:
        pass
    async with NprClient(ServiceAddresses({"controller": address}), patience_seconds=0.5) as client:
        with pytest.raises(UnavailableError, match="controller did not answer"):
            await client.runs.get("r")
        with pytest.raises(UnavailableError, match="controller has not answered"):
            await _sequences(client)


class Reward(reward_pb2_grpc.RewardServiceServicer):
    """Answers with the golds, and refuses every other call as overloaded."""

    name = "reward"
    grpc_names = ("npr.reward.v1.RewardService",)
    refusals = 0
    calls = 0

    def register(self, server: grpc.aio.Server) -> None:
        reward_pb2_grpc.add_RewardServiceServicer_to_server(self, server)

    async def start(self) -> None:
        """Nothing to load."""

    async def drain(self) -> None:
        """Nothing in flight."""

    async def Score(self, request: reward_pb2.ScoreRequest, _: Any) -> reward_pb2.ScoreResponse:
        self.calls += 1
        if self.calls % 2:
            self.refusals += 1
            raise ResourceExhaustedError("full", retry_after_seconds=0.01)
        return reward_pb2.ScoreResponse(scores=[trajectory_pb2.Score(answer=item.gold) for item in request.items])


async def test_scores_keep_the_order_of_many_items_and_wait_for_room() -> None:
    items = [reward_pb2.ScoreItem(gold=str(number)) for number in range(300)]
    reward = Reward()
    async with running_server(reward) as address, NprClient(ServiceAddresses({"reward": address})) as client:
        scores = await client.verification.score(items)

    assert [score.answer for score in scores] == [str(number) for number in range(300)]
    assert reward.refusals


class Rollout(rollout_pb2_grpc.RolloutServiceServicer):
    """Streams for ever; knows when its caller has left. Tells a trajectory again on every watch."""

    name = "rollout"
    grpc_names = ("npr.rollout.v1.RolloutService",)

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.watches = 0
        self.asked: list[rollout_pb2.ServePolicyRequest] = []

    def register(self, server: grpc.aio.Server) -> None:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self, server)

    async def start(self) -> None:
        """Nothing to load."""

    async def drain(self) -> None:
        """Nothing in flight."""

    async def Generate(self, _: rollout_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        try:
            while True:
                yield rollout_pb2.GenerateResponse(tokens=rollout_pb2.TokenChunk(text="x"))
                await asyncio.sleep(0.01)
        finally:
            self.left.set()

    async def ServePolicy(self, request: rollout_pb2.ServePolicyRequest, _: Any) -> rollout_pb2.ServePolicyResponse:
        self.asked.append(request)
        if len(self.asked) == 1:
            raise UnavailableError("going away")
        return rollout_pb2.ServePolicyResponse(aborted=len(self.asked))

    async def WatchJob(self, request: rollout_pb2.WatchJobRequest, _: Any) -> AsyncIterator[Any]:
        self.watches += 1
        first = self.watches == 1
        told = ["g/0"] if first else ["g/0", "g/1"]
        trajectories = [
            trajectory_pb2.ScoredTrajectory(trajectory=trajectory_pb2.Trajectory(trajectory_id=name)) for name in told
        ]
        yield rollout_pb2.WatchJobResponse(job=rollout_pb2.Job(job_id=request.job_id), trajectories=trajectories)
        if first:
            raise UnavailableError("going away")


async def test_leaving_a_generation_aborts_it() -> None:
    rollout = Rollout()
    async with running_server(rollout) as address, NprClient(ServiceAddresses({"rollout": address})) as client:
        responses = client.generate(text_prompt("x"), DecodingOptions())
        assert (await anext(responses)).tokens.text == "x"
        await responses.aclose()
        await asyncio.wait_for(rollout.left.wait(), 10)


async def test_a_deadline_is_the_trajectorys() -> None:
    async with running_server(Rollout()) as address, NprClient(ServiceAddresses({"rollout": address})) as client:
        with pytest.raises(DeadlineExceededError):
            async for _ in client.generate(text_prompt("x"), DecodingOptions(), deadline_seconds=0.2):
                pass


async def test_serving_a_policy_is_asked_for_until_it_is_answered() -> None:
    rollout, policy = Rollout(), policy_pb2.PolicyRef(line="run", version=3, digest="d")
    async with running_server(rollout) as address, NprClient(ServiceAddresses({"rollout": address})) as client:
        answer = await client.serve_policy(policy, InFlight.FINISH_ON_OLD)
    assert answer.aborted == len(rollout.asked) == 2
    for request in rollout.asked:
        assert request.policy == policy
        assert request.in_flight == rollout_pb2.IN_FLIGHT_FINISH_ON_OLD


async def test_each_trajectory_of_a_job_is_told_once() -> None:
    async with running_server(Rollout()) as address, NprClient(ServiceAddresses({"rollout": address})) as client:
        changes = [change async for change in client.jobs.watch("j", with_trajectories=True)]

    told = [scored.trajectory.trajectory_id for change in changes for scored in change.trajectories]
    assert told == ["g/0", "g/1"]


@asynccontextmanager
async def _controller() -> AsyncIterator[str]:
    async with running_server(Controller(drops=1)) as address:
        yield address


@pytest.fixture
def controller_address() -> Iterator[str]:
    """A controller in a loop of its own: the blocking client owns this thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = _controller()
    yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(10)
    asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_the_blocking_client_streams(controller_address: str) -> None:
    with BlockingClient(ServiceAddresses({"controller": controller_address})) as client:
        assert [event.sequence for event in client.watch_run("r")] == list(range(1, EVENTS + 1))
        first = next(iter(client.watch_run("r", after_sequence=4)))  # left half-way: the stream is closed with it
        assert first.sequence == 5


def test_addresses_come_from_the_environment_before_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPR_REWARD_ADDRESS", "reward.example:443")
    addresses = ServiceAddresses.resolve(StateDir.at(tmp_path))
    assert addresses["reward"] == "reward.example:443"
    with pytest.raises(FailedPreconditionError, match="NPR_BUFFER_ADDRESS"):
        addresses["buffer"]


def test_prompts_take_the_field_names_of_public_files(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(
        '{"problem": "1+1", "expected_answer": 2}\n\n'
        '{"question": "2+2", "answer": "4", "id": "q2", "verifier": "exact"}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n',
        encoding="utf-8",
    )
    first, second, third = prompts_from_jsonl(path)

    assert (first.prompt_id, first.messages[0].content, first.gold, first.verifier) == (
        "problems-1",
        "1+1",
        "2",
        "math",
    )
    assert (second.prompt_id, second.gold, second.verifier) == ("q2", "4", "exact")
    assert [message.role for message in third.messages] == ["system", "user"]
    assert third.verifier == ""


@pytest.mark.parametrize(
    "line", ['{"gold": "2"}', '{"messages": []}', '{"messages": [{"role": "user"}]}', '{"prompt": {"text": "x"}}']
)
def test_a_prompt_that_cannot_be_read_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=r"problems\.jsonl:1: "):
        prompts_from_jsonl(path)


def test_missing_and_empty_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        prompts_from_jsonl(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match="holds no prompt"):
        prompts_from_jsonl(tmp_path / "empty.jsonl")


def test_decoding_options_name_every_choice() -> None:
    spec = DecodingOptions(sequential=True, max_tokens=7, temperature=0.5).to_proto()
    assert spec.visibility == sampling_pb2.VISIBILITY_SEQUENTIAL
    assert spec.fork_refusal == sampling_pb2.FORK_REFUSAL_POLICY_SERIALIZE
    assert (spec.limits.max_tokens, spec.sampling.temperature) == (7, 0.5)
    assert spec.budget.share == sampling_pb2.BRANCH_SHARE_FIRST_COME
    assert spec.budget.on_exhausted == sampling_pb2.EXHAUSTION_CLOSE
    refusing = DecodingOptions(reject_refused_forks=True).to_proto()
    assert refusing.visibility == sampling_pb2.VISIBILITY_PARALLEL
    assert refusing.fork_refusal == sampling_pb2.FORK_REFUSAL_POLICY_REJECT


def test_min_p_raw_log_probs_and_the_budget_policy_travel() -> None:
    budget = BudgetOptions(BranchShare.FAIR, Exhaustion.TRUNCATE, 40, 2, 1.5, -3.0)
    spec = DecodingOptions(min_p=0.25, raw_log_probs=True, budget=budget).to_proto()
    assert (spec.sampling.min_p, spec.sampling.raw_log_probs) == (0.25, True)
    assert spec.budget == sampling_pb2.BudgetPolicy(
        share=sampling_pb2.BRANCH_SHARE_FAIR,
        on_exhausted=sampling_pb2.EXHAUSTION_TRUNCATE,
        takeaway_reserve_tokens=40,
        early_stop=sampling_pb2.EarlyStop(quorum=2, straggler_factor=1.5, min_mean_log_prob=-3.0),
    )
