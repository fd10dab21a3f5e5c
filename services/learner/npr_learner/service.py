"""The life of the learner process: choose a device, connect to the buffer, serve, drain."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc
import torch
from transformers.utils.logging import disable_progress_bar

from npr.learner.v1 import learner_pb2, learner_pb2_grpc
from npr_common.config import Addresses
from npr_common.policy_store import PolicyStore
from npr_learner.checkpoint import CheckpointStore
from npr_learner.experience import Experience
from npr_learner.exports import PolicyExporter
from npr_learner.frontiers import Frontiers
from npr_learner.policy import choose_device
from npr_learner.ranks import Ranks, ThisProcess
from npr_learner.ray_head import LOCAL, prepare_environment
from npr_learner.servicer import LearnerServicer
from npr_learner.settings import LearnerSettings
from npr_learner.stages import Stages
from npr_learner.world import World

GRPC_NAME: str = learner_pb2.DESCRIPTOR.services_by_name["LearnerService"].full_name


@dataclass(frozen=True)
class MakeStages:
    """Makes the stages of one process; it can be pickled."""

    policy_store_url: str
    cache_dir: Path

    def __call__(self, world: World) -> Stages:
        """The stages of this process of `world`."""
        disable_progress_bar()  # a service's log is no terminal
        policies = PolicyStore(self.policy_store_url, self.cache_dir)
        return Stages(policies, CheckpointStore(self.policy_store_url), self.cache_dir, world)


def make_ranks(settings: LearnerSettings, addresses: Addresses) -> Ranks:
    """Where the learner computes: here, or on Ray workers."""
    device = choose_device(settings.device)
    make_stages = MakeStages(addresses.policy_store_url, addresses.cache_dir)
    if not settings.workers:
        return ThisProcess(make_stages(World.alone(device)))
    if settings.ray_address == LOCAL:
        prepare_environment()
    from npr_learner.ray_ranks import RayRanks, Workers  # noqa: PLC0415  # imports Ray

    timeout = timedelta(seconds=settings.worker_timeout_seconds)
    workers = Workers(settings.workers, device.type, settings.ray_address, settings.torch_threads, timeout)
    return RayRanks(workers, make_stages)


class LearnerService:
    """`npr_common.rpc.Service` of the learner."""

    name = "learner"
    grpc_names = (GRPC_NAME,)

    def __init__(self, settings: LearnerSettings | None = None, addresses: Addresses | None = None) -> None:
        self._settings = settings or LearnerSettings()
        self._addresses = addresses or Addresses()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer; channels and locks belong to the loop that runs now."""
        policies = PolicyStore(self._addresses.policy_store_url, self._addresses.cache_dir)
        checkpoints = CheckpointStore(self._addresses.policy_store_url)
        ranks = make_ranks(self._settings, self._addresses)
        self._experience = Experience(self._addresses.buffer_address, self._settings.buffer_wait_seconds)
        self._servicer = LearnerServicer(ranks, Frontiers(checkpoints), self._experience, PolicyExporter(policies))
        learner_pb2_grpc.add_LearnerServiceServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Sets torch's threads; stages are loaded when they are asked for."""
        if self._settings.torch_threads is not None:
            torch.set_num_threads(self._settings.torch_threads)

    async def drain(self) -> None:
        """Finishes the step that is on its way."""
        await self._servicer.drain()
        await self._experience.close()
