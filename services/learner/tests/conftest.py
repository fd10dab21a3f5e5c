"""A world of small trajectories, and a real buffer process on a real Valkey, shared by all tests."""

import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr.learner.v1 import learner_pb2, learner_pb2_grpc
from npr.types.v1 import policy_pb2, prompt_pb2, sampling_pb2, trajectory_pb2
from npr_common.config import Addresses
from npr_common.errors import rpc_errors
from npr_common.rpc import connect
from npr_common.testing.processes import service_process
from npr_common.testing.servers import running_server
from npr_common.testing.valkey import valkey_server
from npr_learner.service import LearnerService
from npr_learner.settings import LearnerSettings
from npr_learner.testing import WORDS, World, make_world, qwen3, word_tokenizer


@pytest.fixture
def world() -> World:
    return make_world()


@pytest.fixture(scope="session")
def buffer_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("buffer")
    with (
        valkey_server(folder / "valkey") as valkey,
        service_process("npr_buffer", folder, {"NPR_BUFFER_REDIS_URL": valkey.url}) as process,
    ):
        yield process.address


@dataclass
class Rig:
    """A model on disk, a policy store, the buffer, and a learner's RPCs as a controller uses them."""

    folder: Path
    buffer_address: str
    run_id: str = field(default_factory=lambda: f"run-{uuid.uuid4().hex[:8]}")
    learner: "learner_pb2_grpc.LearnerServiceAsyncStub | None" = None
    buffer: "buffer_pb2_grpc.BufferServiceAsyncStub | None" = None

    @property
    def addresses(self) -> Addresses:
        return Addresses(
            buffer_address=self.buffer_address,
            policy_store_url=f"file://{self.folder}/store",
            cache_dir=self.folder / "cache",
        )

    def save_model(self) -> str:
        path = self.folder / "model"
        if not path.exists():
            tokenizer = word_tokenizer()
            tokenizer.save_pretrained(path)
            qwen3(len(WORDS), seed=7).save_pretrained(path)
        return str(path)

    @asynccontextmanager
    async def connected(self, learner_address: str) -> AsyncIterator["Rig"]:
        async with connect(learner_address) as learner, connect(self.buffer_address) as buffer:
            self.learner = learner_pb2_grpc.LearnerServiceStub(learner)
            self.buffer = buffer_pb2_grpc.BufferServiceStub(buffer)
            yield self

    @asynccontextmanager
    async def running(self, workers: int = 0) -> AsyncIterator["Rig"]:
        """A fresh learner in this process, over the same store and buffer; `workers` do its work, or itself."""
        settings = LearnerSettings(
            device="cpu", buffer_wait_seconds=5.0, workers=workers, worker_timeout_seconds=60.0, torch_threads=1
        )
        async with running_server(LearnerService(settings, self.addresses)) as address, self.connected(address):
            yield self

    async def start(self, stage: str, objective: str, **changes: object) -> learner_pb2.StartStageResponse:
        options = changes.pop("options_json", '{"learning_rate": 1e-3}')
        parallel = objective != "DAPO"
        request = learner_pb2.StartStageRequest(
            run_id=self.run_id,
            stage=stage,
            source=changes.pop("source", learner_pb2.ModelSource(model=self.save_model())),
            objective=learner_pb2.Objective.Value(f"OBJECTIVE_{objective}"),
            options_json=options,
            add_tag_tokens=parallel,
            visibility=sampling_pb2.VISIBILITY_PARALLEL if parallel else sampling_pb2.VISIBILITY_SEQUENTIAL,
        )
        request.MergeFrom(learner_pb2.StartStageRequest(**changes))
        with rpc_errors():
            return await self.learner.StartStage(request)

    async def experience(
        self, policy: policy_pb2.PolicyRef, name: str, *, groups: int = 3, samples: int = 4, parallel: bool = True
    ) -> list[str]:
        """READY groups of random trajectories, as if this policy had been rolled out."""
        world, generator = make_world(policy), np.random.default_rng(list(name.encode()))
        group_ids = [f"{name}-{index}" for index in range(groups)]
        with rpc_errors():
            await self.buffer.EnqueueGroups(
                buffer_pb2.EnqueueGroupsRequest(
                    request_id=uuid.uuid4().hex, groups=[self.group(group_id, samples) for group_id in group_ids]
                )
            )
            for group_id in group_ids:
                make = world.parallel if parallel else world.sequential
                scored = [self.scored(make(generator, group_id, index), index) for index in range(samples)]
                await self.buffer.AppendTrajectories(
                    buffer_pb2.AppendTrajectoriesRequest(run_id=self.run_id, trajectories=scored)
                )
        return group_ids

    def group(self, group_id: str, samples: int) -> buffer_pb2.Group:
        sampling = sampling_pb2.Sampling(temperature=1.0, top_p=1.0)
        return buffer_pb2.Group(
            group_id=group_id,
            run_id=self.run_id,
            channel="train",
            prompt=prompt_pb2.Prompt(
                prompt_id=group_id, messages=[prompt_pb2.ChatMessage(role="user", content="alpha+beta")]
            ),
            sample_count=samples,
            decoding=sampling_pb2.DecodingSpec(sampling=sampling, limits=sampling_pb2.Limits(max_tokens=200)),
        )

    @staticmethod
    def scored(trajectory: trajectory_pb2.Trajectory, index: int) -> trajectory_pb2.ScoredTrajectory:
        """Every third one is wrong."""
        correct = index % 3 != 0
        verdict = trajectory_pb2.VERDICT_KIND_CORRECT if correct else trajectory_pb2.VERDICT_KIND_INCORRECT
        score = trajectory_pb2.Score(verdict=verdict, reward=1.0 if correct else -1.0)
        return trajectory_pb2.ScoredTrajectory(trajectory=trajectory, score=score)

    async def train(self, stage: str, step: int, group_ids: Sequence[str]) -> list[learner_pb2.TrainStepResponse]:
        request = learner_pb2.TrainStepRequest(run_id=self.run_id, stage=stage, step=step, group_ids=group_ids)
        with rpc_errors():
            return [answer async for answer in self.learner.TrainStep(request)]

    async def fine_tune(
        self, stage: str, group_ids: Sequence[str], samples: int = 4
    ) -> list[learner_pb2.FineTuneResponse]:
        request = self.fine_tune_request(stage, group_ids, samples)
        with rpc_errors():
            return [answer async for answer in self.learner.FineTune(request)]

    def fine_tune_request(self, stage: str, group_ids: Sequence[str], samples: int = 4) -> learner_pb2.FineTuneRequest:
        ids = [f"{group_id}/{index}" for group_id in group_ids for index in range(samples)]
        return learner_pb2.FineTuneRequest(run_id=self.run_id, stage=stage, trajectory_ids=ids, group_ids=group_ids)

    async def stage(self, stage: str) -> learner_pb2.GetStageResponse:
        with rpc_errors():
            return await self.learner.GetStage(learner_pb2.GetStageRequest(run_id=self.run_id, stage=stage))

    async def consumed_by(self) -> dict[str, int]:
        """Groups consumed by each consumer; the run must be sound."""
        with rpc_errors():
            audit = await self.buffer.AuditRun(buffer_pb2.AuditRunRequest(run_id=self.run_id))
        assert list(audit.problems) == []
        return dict(audit.consumed_by)


@pytest.fixture
def rig(tmp_path: Path, buffer_address: str) -> Rig:
    return Rig(tmp_path, buffer_address)


@pytest.fixture
def new_rig(tmp_path_factory: pytest.TempPathFactory, buffer_address: str) -> Callable[[], Rig]:
    return lambda: Rig(tmp_path_factory.mktemp("rig"), buffer_address)
