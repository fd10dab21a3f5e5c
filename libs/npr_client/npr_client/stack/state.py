"""What is known of a local stack, in one JSON file that is replaced as a whole.

A reader never sees half a file. A file of another form (an older version, a damaged disk) is a typed error that says
what to do, never a guess.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from npr_client.stack.processes import ProcessIdentity
from npr_common.errors import DataLossError
from npr_common.files import write_atomically


class Phase(StrEnum):
    """Where the supervisor is with a component."""

    STARTING = "starting"
    RUNNING = "running"
    BACKING_OFF = "backing_off"
    WRONG_SETTINGS = "wrong_settings"
    STOPPED = "stopped"


class ComponentState(BaseModel):
    """One component as the supervisor knows it.

    `launched_with` holds the addresses of the components it needs, as they were when it was started.
    `failed_starts` counts the starts in a row that never became healthy.
    `last_error` has a line for each variable when the settings are wrong.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    phase: Phase = Phase.STOPPED
    process: ProcessIdentity | None = None
    address: str | None = None
    restarts: int = 0
    failed_starts: int = 0
    launched_with: Mapping[str, str] = Field(default_factory=dict)
    last_error: str = ""


class StackState(BaseModel):
    """The whole stack. `stack_id` marks every process of it in its environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stack_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    supervisor: ProcessIdentity | None = None
    components: Mapping[str, ComponentState] = Field(default_factory=dict)

    def component(self, name: str) -> ComponentState:
        """The component's state; a fresh one for a component that was never started."""
        return self.components.get(name, ComponentState())

    def with_component(self, name: str, component: ComponentState) -> StackState:
        return self.model_copy(update={"components": {**self.components, name: component}})

    def with_supervisor(self, supervisor: ProcessIdentity | None) -> StackState:
        return self.model_copy(update={"supervisor": supervisor})

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses of the components that have one, running or not."""
        return {name: state.address for name, state in self.components.items() if state.address is not None}

    def running(self, name: str) -> bool:
        """Whether the component is healthy by the supervisor's account and its process lives."""
        component = self.component(name)
        return component.phase is Phase.RUNNING and component.process is not None and component.process.alive()

    @property
    def living(self) -> tuple[str, ...]:
        """Components whose process lives."""
        return tuple(name for name, c in self.components.items() if c.process is not None and c.process.alive())

    @property
    def supervisor_alive(self) -> bool:
        return self.supervisor is not None and self.supervisor.alive()


def load_state(path: Path) -> StackState | None:
    """The state in the file; None when there is none.

    Raises:
        DataLossError: the file is not a stack's state.
    """
    try:
        return StackState.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        message = f"{path} is not a local stack's state: stop what runs from it by hand, then delete the file"
        raise DataLossError(message, reason="STACK_STATE_UNREADABLE", metadata={"path": str(path)}) from error


def save_state(path: Path, state: StackState) -> None:
    """Replaces the file by this state."""
    write_atomically(path, f"{state.model_dump_json(indent=2)}\n".encode())
