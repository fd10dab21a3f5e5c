"""The asynchronous client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from npr.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from npr.types.v1 import policy_pb2, prompt_pb2
from npr_client.sdk.addresses import ServiceAddresses
from npr_client.sdk.channels import DEFAULT_PATIENCE_SECONDS, Channels
from npr_client.sdk.decoding import DecodingOptions
from npr_client.sdk.jobs import Jobs, new_id
from npr_client.sdk.policies import InFlight, Policies
from npr_client.sdk.runs import Runs
from npr_client.sdk.trajectories import Trajectories
from npr_client.sdk.verification import Verification
from npr_client.stack.layout import StateDir
from npr_common.errors import rpc_errors


class NprClient:
    """All services by one object: `jobs`, `runs`, `policies`, `trajectories`, `verification`, and the engine's calls.

    Channels open when they are first used, so that a client needs only the services that it asks.
    """

    def __init__(self, addresses: ServiceAddresses, *, patience_seconds: float = DEFAULT_PATIENCE_SECONDS) -> None:
        self._channels = Channels(addresses, patience_seconds)
        self.jobs = Jobs(self._channels)
        self.runs = Runs(self._channels)
        self.policies = Policies(self._channels)
        self.trajectories = Trajectories(self._channels)
        self.verification = Verification(self._channels)

    @classmethod
    def connect(
        cls, state_dir: StateDir | None = None, *, patience_seconds: float = DEFAULT_PATIENCE_SECONDS
    ) -> NprClient:
        """A client of the services that the environment names, and of the local stack for the rest."""
        return cls(ServiceAddresses.resolve(state_dir), patience_seconds=patience_seconds)

    async def generate(
        self, prompt: prompt_pb2.Prompt, decoding: DecodingOptions, *, deadline_seconds: float | None = None
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """Tokens as they are decoded, branches interleaved; the last message holds the trajectory.

        Leaving the iteration aborts the trajectory. Not repeated when the service goes away: what was sampled is lost.
        """
        stub: rollout_pb2_grpc.RolloutServiceAsyncStub = rollout_pb2_grpc.RolloutServiceStub(
            self._channels.to("rollout")
        )
        request = rollout_pb2.GenerateRequest(
            request_id=new_id("generate"), prompt=prompt, decoding=decoding.to_proto()
        )
        call = stub.Generate(request, timeout=deadline_seconds)
        try:
            with rpc_errors():
                async for response in call:
                    yield response
        finally:
            call.cancel()

    async def engine_status(self, *, audit: bool = False) -> rollout_pb2.GetEngineStatusResponse:
        """What the engine is doing; `audit` compares its page allocator with the live page tables."""
        stub: rollout_pb2_grpc.RolloutServiceAsyncStub = rollout_pb2_grpc.RolloutServiceStub(
            self._channels.to("rollout")
        )
        request = rollout_pb2.GetEngineStatusRequest(audit=audit)
        return await self._channels.call("rollout", lambda: stub.GetEngineStatus(request))

    async def serve_policy(
        self, policy: policy_pb2.PolicyRef, in_flight: InFlight = InFlight.DRAIN
    ) -> rollout_pb2.ServePolicyResponse:
        """Serves another policy from now on; returns once it does. Leaving the call leaves what is served as it is.

        Raises:
            NotFoundError: the policy is not in the store.
            DataLossError: its files or its canary forward are not what was published; the one before it is served.
            FailedPreconditionError: the engine can't serve it, or another swap is under way.
        """
        stub: rollout_pb2_grpc.RolloutServiceAsyncStub = rollout_pb2_grpc.RolloutServiceStub(
            self._channels.to("rollout")
        )
        request = rollout_pb2.ServePolicyRequest(
            request_id=new_id("serve-policy"), policy=policy, in_flight=in_flight.to_proto()
        )
        return await self._channels.call("rollout", lambda: stub.ServePolicy(request))

    async def close(self) -> None:
        """Closes the channels; calls in flight are cancelled."""
        await self._channels.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
