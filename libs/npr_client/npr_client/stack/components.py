"""What a local stack is made of: components, what each needs, how it starts and how it is probed.

The order is acyclic: a component starts when all that it needs is healthy, and stops when none that needs it is left.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from npr_client.stack.layout import StateDir
from npr_client.stack.probes import Health, grpc_health, valkey_health
from npr_common.embedded_valkey import valkey_command
from npr_common.errors import InvalidArgumentError
from npr_common.ports import free_port, is_free, port_of

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Launch:
    """How to start one process."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    # Known before the start where the component can't say it itself.
    address: str | None = None


class Component(ABC):
    """One process of the stack."""

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def launch(self, state_dir: StateDir, addresses: Mapping[str, str]) -> Launch:
        """How to start it, given the addresses of what it needs and its own last one."""

    @abstractmethod
    def address(self, state_dir: StateDir, recorded: str | None) -> str | None:
        """Where the started component listens; None while it has not said so."""

    @abstractmethod
    async def health(self, address: str) -> Health:
        """Asks the running component how it is."""

    def _port(self, addresses: Mapping[str, str]) -> int | None:
        """The port it had before, when nobody else has taken it."""
        last = addresses.get(self.name)
        port = port_of(last) if last else None
        return port if port and is_free(port) else None


class ValkeyComponent(Component):
    """Work, experience and run state, in an append-only file.

    Every answered write is in the kernel's hands before its answer (killing the process loses nothing) and on the disk
    within a second.
    """

    name = "valkey"

    def launch(self, state_dir: StateDir, addresses: Mapping[str, str]) -> Launch:
        # Valkey can't bind port 0; a port lost between here and its bind costs one more start.
        port = self._port(addresses) or free_port()
        # A process title would be written over the environment, which bears the stack's mark.
        command = (*valkey_command(state_dir.valkey_folder, port), "--set-proc-title", "no")
        return Launch(command, {}, address=f"{LOOPBACK}:{port}")

    def address(self, state_dir: StateDir, recorded: str | None) -> str | None:
        return recorded

    async def health(self, address: str) -> Health:
        return await valkey_health(address)


class ServiceComponent(Component):
    """One gRPC service, `python -m npr_<name>`."""

    def launch(self, state_dir: StateDir, addresses: Mapping[str, str]) -> Launch:
        listen = f"{LOOPBACK}:{self._port(addresses) or 0}"
        environment = {
            "NPR_LISTEN": listen,
            "NPR_ADDRESS_FILE": str(state_dir.address_file(self.name)),
            "NPR_POLICY_STORE_URL": state_dir.policy_store_url,
            "NPR_CACHE_DIR": str(state_dir.cache_folder),
            "TQDM_DISABLE": "1",  # the libraries' progress bars are no log lines
            **cpu_environment(),
            **self._needed(addresses),
        }
        return Launch((sys.executable, "-m", f"npr_{self.name}"), environment)

    def _needed(self, addresses: Mapping[str, str]) -> dict[str, str]:
        services = {f"NPR_{need.upper()}_ADDRESS": addresses[need] for need in self.needs if need != "valkey"}
        if "valkey" in self.needs:
            services[f"NPR_{self.name.upper()}_REDIS_URL"] = f"redis://{addresses['valkey']}/0"
        return services

    def address(self, state_dir: StateDir, recorded: str | None) -> str | None:
        try:
            return state_dir.address_file(self.name).read_text(encoding="utf-8").strip() or None
        except FileNotFoundError:
            return None

    async def health(self, address: str) -> Health:
        return await grpc_health(address, f"npr.{self.name}.v1.{self.name.capitalize()}Service")


class BufferComponent(ServiceComponent):
    """Work queue and experience."""

    name = "buffer"
    needs = ("valkey",)


class RewardComponent(ServiceComponent):
    """Verifiers."""

    name = "reward"


class RolloutComponent(ServiceComponent):
    """The engine and jobs."""

    name = "rollout"
    needs = ("buffer", "reward")


class LearnerComponent(ServiceComponent):
    """Policy updates."""

    name = "learner"
    needs = ("buffer",)


class ControllerComponent(ServiceComponent):
    """Runs."""

    name = "controller"
    needs = ("valkey", "buffer", "learner")


COMPONENTS: Mapping[str, Component] = {
    component.name: component
    for component in (
        ValkeyComponent(),
        BufferComponent(),
        RewardComponent(),
        RolloutComponent(),
        LearnerComponent(),
        ControllerComponent(),
    )
}
SERVICES = tuple(name for name in COMPONENTS if name != "valkey")


def cpu_environment() -> dict[str, str]:
    """Thread settings of the children, where the user has not set them.

    Five processes share the cores: threads that spin while they wait for work steal them from those that have some.
    """
    defaults = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def with_needs(names: Iterable[str]) -> tuple[str, ...]:
    """These components and all that they need, in starting order.

    Raises:
        InvalidArgumentError: one of the names is no component.
    """
    wanted: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in COMPONENTS:
            message = f"the stack has no component {name!r}: choose from {', '.join(COMPONENTS)}"
            raise InvalidArgumentError(message, reason="UNKNOWN_COMPONENT", metadata={"component": name})
        if name not in wanted:
            wanted.add(name)
            pending.extend(COMPONENTS[name].needs)
    return tuple(name for name in COMPONENTS if name in wanted)


def dependents(name: str) -> tuple[str, ...]:
    """Components that need this one directly."""
    return tuple(other.name for other in COMPONENTS.values() if name in other.needs)
