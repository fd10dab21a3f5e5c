"""Where the services are: from the environment, else from the local stack."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from npr_client.stack.components import SERVICES
from npr_client.stack.layout import StateDir
from npr_client.stack.state import StackState, load_state
from npr_common.errors import FailedPreconditionError


@dataclass(frozen=True)
class ServiceAddresses:
    """gRPC targets by service name. A service may be unknown until it is asked for."""

    by_name: Mapping[str, str]

    def __getitem__(self, service: str) -> str:
        """The target of a service.

        Raises:
            FailedPreconditionError: nobody told where it is.
        """
        if service in self.by_name:
            return self.by_name[service]
        message = f"no {service} service is known: start a local stack with `npr up`, or set {_variable(service)}"
        raise FailedPreconditionError(message, reason="NO_STACK", metadata={"service": service})

    @classmethod
    def from_environment(cls) -> ServiceAddresses:
        """Targets in NPR_BUFFER_ADDRESS, NPR_REWARD_ADDRESS and so on."""
        return cls({name: os.environ[_variable(name)] for name in SERVICES if os.environ.get(_variable(name))})

    @classmethod
    def resolve(cls, state_dir: StateDir | None = None) -> ServiceAddresses:
        """Targets from the environment, and those of the local stack for the rest."""
        state = load_state((state_dir or StateDir.at(None)).state_file) or StackState()
        local = {name: address for name, address in state.addresses.items() if _is_kept(state, name)}
        return cls({**local, **cls.from_environment().by_name})


def _is_kept(state: StackState, name: str) -> bool:
    """Whether the service runs, or is about to run again at its address."""
    return name in SERVICES and (state.supervisor_alive or name in state.living)


def _variable(service: str) -> str:
    return f"NPR_{service.upper()}_ADDRESS"
