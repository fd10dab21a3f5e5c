"""Workers on a Ray cluster against one process: the same numbers, whatever ends, hangs, fails or leaves.

The tolerance is that of float32 sums in another order: 5e-5 of a loss or norm, 5e-5 in a weight after twenty steps at a
learning rate of 1e-3.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from npr.buffer.v1 import buffer_pb2
from npr.learner.v1 import learner_pb2
from npr.types.v1 import policy_pb2, sampling_pb2, trajectory_pb2
from npr_common.config import Addresses
from npr_common.errors import CancelledError, FailedPreconditionError, InternalError, NprError, UnavailableError
from npr_learner.checkpoint import CheckpointStore
from npr_learner.fine_tuning import GroupSource
from npr_learner.gradient import Observer
from npr_learner.options import Malformed, StageOptions
from npr_learner.ranks import Ranks, Result, Update
from npr_learner.records import StageKey, StageRecord, StageSpec
from npr_learner.service import make_ranks
from npr_learner.settings import LearnerSettings
from npr_learner.stages import Stages
from npr_learner.testing import WORDS, make_world, qwen3, word_tokenizer
from npr_learner.world import World

STEPS = 20
SEQUENTIAL = ("DAPO", "GRPO")
TOLERANCE = 5e-5
OBJECTIVES = ("PAPO", "DAPO", "GRPO", "SFT")
REF = policy_pb2.PolicyRef(line="run", version=0, digest="d")
OPTIONS = StageOptions(
    learning_rate=1e-3,
    micro_batch_tokens=150,
    minibatches_per_step=2,
    tokens_per_update=400,
    epochs=5,
    malformed=Malformed.INCORRECT,
)


class Job:
    """One stage of each objective, driven as the service drives it, over a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store_url = f"file://{folder}/store"
        if not (folder / "model").exists():
            word_tokenizer().save_pretrained(folder / "model")
            qwen3(len(WORDS), seed=7).save_pretrained(folder / "model")

    @asynccontextmanager
    async def ranks(self, workers: int, timeout_seconds: float = 60.0) -> AsyncIterator[Ranks]:
        """Fresh processes: `workers` on Ray, or this one alone."""
        settings = LearnerSettings(
            device="cpu", workers=workers, torch_threads=1, worker_timeout_seconds=timeout_seconds
        )
        addresses = Addresses(buffer_address="", policy_store_url=self.store_url, cache_dir=self.folder / "cache")
        made = make_ranks(settings, addresses)
        try:
            yield made
        finally:
            await made.close()

    async def start(self, ranks: Ranks, objective: str) -> StageRecord:
        spec, source = self.spec(objective), learner_pb2.ModelSource(model=str(self.folder / "model"))
        return await ranks.run(lambda stages, _: stages.start(spec, source))

    async def train(self, ranks: Ranks, objective: str, step: int) -> StageRecord:
        """One step; of fine-tuning, all updates."""
        async with aclosing(self.stream(ranks, objective, step)) as events:
            async for event in events:
                if isinstance(event, Result):
                    return event.value
        raise AssertionError("no result")

    def stream(self, ranks: Ranks, objective: str, step: int) -> Any:
        key, groups = self.spec(objective).key, self.groups(objective, step)
        if objective == "SFT":
            source = GroupSource(groups, frozenset(ids(groups)), frozenset())
            return ranks.stream(lambda stages, observe: stages.fine_tune(key, source, "sft", observe))
        return ranks.stream(lambda stages, observe: stages.train(key, REF, groups, consumer="c", observe=observe))

    async def whole(self, ranks: Ranks, objective: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        """The metrics of every step, and the weights in the end."""
        await self.start(ranks, objective)
        steps = 1 if objective == "SFT" else STEPS
        records = [await self.train(ranks, objective, step) for step in range(steps)]
        return [measured(record) for record in records], self.weights(objective)

    def weights(self, objective: str) -> dict[str, torch.Tensor]:
        """Of the checkpoint, however many processes wrote it, read by one."""
        alone = World.alone(torch.device("cpu"))
        checkpoint = CheckpointStore(self.store_url).load(self.spec(objective).key, alone)
        assert checkpoint is not None
        tensors = {n: torch.zeros(shape) for n, shape in checkpoint.shapes.items() if n.startswith("model.")}
        checkpoint.read_into(tensors)
        return tensors

    @staticmethod
    def spec(objective: str) -> StageSpec:
        parallel = objective not in SEQUENTIAL
        visibility = sampling_pb2.VISIBILITY_PARALLEL if parallel else sampling_pb2.VISIBILITY_SEQUENTIAL
        return StageSpec(
            key=StageKey(run_id="run", stage=objective.lower()),
            objective=learner_pb2.Objective.Value(f"OBJECTIVE_{objective}"),
            visibility=visibility,
            dialect="npr",
            add_tag_tokens=True,
            options=OPTIONS,
        )

    @staticmethod
    def groups(objective: str, step: int) -> list[buffer_pb2.ReadGroupsResponse]:
        """Two groups of four; six for fine-tuning."""
        world, generator = make_world(REF), np.random.default_rng([step, *objective.encode()])
        make = world.sequential if objective in SEQUENTIAL else world.parallel
        sampling = sampling_pb2.Sampling(temperature=1.0, top_p=1.0)
        found = []
        for name in (f"{step}-{index}" for index in range(6 if objective == "SFT" else 2)):
            group = buffer_pb2.Group(group_id=name, decoding=sampling_pb2.DecodingSpec(sampling=sampling))
            scored = [scored_of(make(generator, name, index), index) for index in range(4)]
            found.append(buffer_pb2.ReadGroupsResponse(group=group, trajectories=scored))
        return found


def scored_of(trajectory: trajectory_pb2.Trajectory, index: int) -> trajectory_pb2.ScoredTrajectory:
    correct = index % 3 != 0
    verdict = trajectory_pb2.VERDICT_KIND_CORRECT if correct else trajectory_pb2.VERDICT_KIND_INCORRECT
    score = trajectory_pb2.Score(verdict=verdict, reward=1.0 if correct else -1.0)
    return trajectory_pb2.ScoredTrajectory(trajectory=trajectory, score=score)


def ids(groups: Sequence[buffer_pb2.ReadGroupsResponse]) -> list[str]:
    return [scored.trajectory.trajectory_id for item in groups for scored in item.trajectories]


def measured(record: StageRecord) -> dict[str, float]:
    """What doesn't depend on the clock, or on how rows are packed."""
    assert record.last_step is not None
    return {n: v for n, v in record.last_step.metrics.items() if n not in ("seconds", "computed_tokens")}


def pids(workers: int) -> list[int]:
    """Of the workers that run now on this process's own cluster."""
    below = psutil.Process().children(recursive=True)
    found = [process.pid for process in below if "ray::Rank" in " ".join(process.cmdline())]
    assert len(found) == workers
    return sorted(found)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process computes, by objective."""

    async def compute() -> dict[str, Any]:
        job = Job(tmp_path_factory.mktemp("alone"))
        async with job.ranks(0) as ranks:
            return {objective: await job.whole(ranks, objective) for objective in OBJECTIVES}

    return asyncio.run(compute())


@pytest.mark.parametrize("workers", [4, 2, 1])  # the most first: the local cluster has room for so many
async def test_any_number_of_workers_learns_the_same(tmp_path: Path, alone: dict[str, Any], workers: int) -> None:
    job = Job(tmp_path)
    async with job.ranks(workers) as ranks:
        for objective in OBJECTIVES:
            metrics, weights = await job.whole(ranks, objective)
            expected_metrics, expected_weights = alone[objective]
            for found, expected in zip(metrics, expected_metrics, strict=True):
                assert found == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), objective
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=TOLERANCE, msg=name)
        assert metrics[0]["updates"] >= STEPS


async def test_a_worker_killed_mid_step_changes_nothing(tmp_path: Path) -> None:
    first, second = Job(tmp_path / "a"), Job(tmp_path / "b")
    async with first.ranks(2) as ranks:
        await first.start(ranks, "PAPO")
        expected = [measured(await first.train(ranks, "PAPO", step)) for step in range(3)]
    async with second.ranks(2) as ranks:
        await second.start(ranks, "PAPO")
        found = [measured(await second.train(ranks, "PAPO", 0))]
        with pytest.raises(UnavailableError, match=r"rank \d has ended") as caught:
            async with aclosing(second.stream(ranks, "PAPO", 1)) as events:
                async for event in events:
                    if isinstance(event, Update):
                        os.kill(pids(2)[1], signal.SIGKILL)
        assert caught.value.reason == "RANK_ENDED"
        found += [measured(await second.train(ranks, "PAPO", step)) for step in (1, 2)]
    assert found == expected
    for name, weight in second.weights("PAPO").items():
        assert torch.equal(weight, first.weights("PAPO")[name]), name


async def test_a_worker_that_hangs_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path)
    async with job.ranks(2, timeout_seconds=8.0) as ranks:
        await job.start(ranks, "PAPO")
        before = pids(2)
        os.kill(before[1], signal.SIGSTOP)
        with pytest.raises(UnavailableError, match=r"rank (\d) waited 8 s at .*: rank (?!\1)\d is at ") as caught:
            await job.train(ranks, "PAPO", 0)
        assert caught.value.reason == "RANK_NOT_THERE"
        assert (await job.train(ranks, "PAPO", 0)).next_step == 1
        assert not set(pids(2)) & set(before)


async def test_a_worker_that_nobody_waits_for_but_the_caller_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path)

    def stop_the_second(stages: Stages, observe: Observer) -> None:
        if stages._world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    async with job.ranks(2, timeout_seconds=8.0) as ranks:
        await job.start(ranks, "PAPO")
        by_value(ranks)
        with pytest.raises(UnavailableError, match="rank 1 has not ended within 8 s what others have"):
            await ranks.run(stop_the_second)
        assert (await job.train(ranks, "PAPO", 0)).next_step == 1


async def test_a_caller_that_leaves_stops_every_worker_at_one_point(tmp_path: Path) -> None:
    job = Job(tmp_path)
    async with job.ranks(2) as ranks:
        await job.start(ranks, "PAPO")
        before = pids(2)
        async with aclosing(job.stream(ranks, "PAPO", 0)) as events:
            assert isinstance(await anext(events), Update)
        assert pids(2) == before
        assert (await job.train(ranks, "PAPO", 0)).next_step == 1
        assert pids(2) == before


async def test_what_every_worker_refuses_ends_none(tmp_path: Path) -> None:
    job = Job(tmp_path)
    async with job.ranks(2) as ranks:
        await job.start(ranks, "PAPO")
        before = pids(2)
        key, other = job.spec("PAPO").key, policy_pb2.PolicyRef(line="run", version=7)
        groups = job.groups("PAPO", 0)
        with pytest.raises(FailedPreconditionError, match="is of policy run version 0") as caught:
            await ranks.run(lambda stages, _: stages.train(key, other, groups, consumer="c", observe=lambda *_: None))
        assert caught.value.reason == "WRONG_POLICY"
        assert (await job.train(ranks, "PAPO", 0)).next_step == 1
        assert pids(2) == before


async def test_what_one_worker_alone_raises_is_told_and_all_are_replaced(tmp_path: Path) -> None:
    job = Job(tmp_path)

    def fail_on_the_second(stages: Stages, observe: Observer) -> None:
        if stages._world.rank == 1:
            raise RuntimeError("only here")  # of the type that a collective raises
        stages._world.meet("a place that the second does not come to")

    async with job.ranks(2) as ranks:
        await job.start(ranks, "PAPO")
        before = pids(2)
        by_value(ranks)
        with pytest.raises(InternalError, match="rank 1 failed: RuntimeError: only here"):
            await ranks.run(fail_on_the_second)
        assert (await job.train(ranks, "PAPO", 0)).next_step == 1
        assert not set(pids(2)) & set(before)


def by_value(ranks: Ranks) -> None:
    """Lets functions of this file be sent to workers, which can't import it."""
    import ray.cloudpickle

    assert ranks is not None
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


async def test_more_workers_than_the_cluster_has_room_for_are_refused(tmp_path: Path) -> None:
    job = Job(tmp_path)
    async with job.ranks(64, timeout_seconds=2.0) as ranks:
        with pytest.raises(UnavailableError, match="no room for 64 workers") as caught:
            await job.start(ranks, "PAPO")
        assert caught.value.reason == "NO_ROOM_FOR_WORKERS"


KILLED = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from test_learner_worlds import Job, Path

async def main():
    job = Job(Path({tmp!r}))
    async with job.ranks(1) as ranks:
        await job.start(ranks, "PAPO")
        print("started", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_learner_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    script = KILLED.format(folder=str(Path(__file__).parent), tmp=str(tmp_path))
    learner = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    )
    assert learner.stdout is not None
    assert await asyncio.to_thread(learner.stdout.readline) == "started\n"
    children = psutil.Process(learner.pid).children(recursive=True)
    assert any("ray::Rank" in " ".join(child.cmdline()) for child in children)
    learner.kill()
    learner.wait()
    _, left = await asyncio.to_thread(psutil.wait_procs, children, 60)
    assert left == []


def test_errors_cross_between_processes_whole() -> None:
    import pickle

    error = FailedPreconditionError("m", reason="R", metadata={"a": "b"}, retry_after_seconds=2.0)
    copy: NprError = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.message, vars(copy)) == (type(error), "m", vars(error))
    assert not isinstance(copy, CancelledError)
