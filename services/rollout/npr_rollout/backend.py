"""What decodes: the seam between the service and its engines.

Invariants:
- A backend brings a policy to where it can be served (`prepare`) without touching what is being served; what it returns
  is called in the engine's thread, between two steps, and makes the engine.
- Whatever the backend, an engine takes requests, decodes them step by step, and ends each of them in one typed outcome.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from npr.types.v1 import policy_pb2
from npr_rollout.record.request import Event, Request
from npr_rollout.status import EngineStatus

if TYPE_CHECKING:
    from npr_rollout.swap import Build

T = TypeVar("T")


class DecodingEngine(Protocol):
    """Decodes requests with one policy. One thread calls it."""

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        ...

    def submit(self, request: Request) -> str:
        """Put a request in line; its id. Raises InvalidArgumentError, AlreadyExistsError."""
        ...

    def step(self) -> list[Event]:
        """Go on with what runs; what came of it. Whatever it raises is a fault of the engine."""
        ...

    def abort(self, request_id: str, message: str = ...) -> bool:
        """End a request with all its branches; whether it was on its way. Its end comes with the next step's events."""
        ...

    def status(self) -> EngineStatus:
        """What it is doing. Never raises: what is wrong with an engine is told by its next step."""
        ...

    def audit(self) -> tuple[str, ...]:
        """What is wrong with its memory, each a sentence. Never raises."""
        ...


class BetweenSteps(Protocol):
    """Runs a function in the engine's thread, between two steps."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


class EngineBackend(Protocol):
    """Makes engines.

    Attributes:
        name: what it is called in the settings.
        can_serve_two: whether a policy can be served while requests of the one before it are finished.
    """

    name: str
    can_serve_two: bool

    async def check_setup(self) -> None:
        """Raises WrongSettingsError where no policy could ever be served with these settings; it may take a while."""
        ...

    def check_can_sleep(self) -> None:
        """Raises FailedPreconditionError where `sleep` could not give back the memory."""
        ...

    async def prepare(self, ref: policy_pb2.PolicyRef, between_steps: BetweenSteps) -> Build:
        """Fetch and check a policy; what it returns serves it.

        Raises:
            NotFoundError: the policy is not in the store.
            DataLossError: its files are not what they were, or it does not say what it must.
            FailedPreconditionError: it can't be served here.
        """
        ...

    async def sleep(self) -> None:
        """Give back memory that outlives the engines; none is there any more. The next `prepare` and build wake it."""
        ...

    async def close(self) -> None:
        """Give back whatever outlives the engines."""
        ...
