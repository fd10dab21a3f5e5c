"""How a policy's weights get into a running server: three ways.

- `disk`: the server reads the folder itself; both see one file system.
- `tensors`: this process reads the files, and hands the tensors over in shared memory; both run on one host.
- `group`: this process reads the files, and broadcasts the tensors through a `torch.distributed` group of its own with
  the server's workers, which may be on other hosts.

Invariants:
- The cache is flushed before the first weight changes, and nothing may be in flight.
- The server bears a policy's stamp only when it has all of its weights: until then the stamp is `PARTIAL`. So one that
  failed half-way is known by what it says of itself, and is loaded again.
- Tensors go as they were published: the server's own loader gives each its place, its slice and its type, as from disk.
- Some of a model is in memory at a time, not the whole.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator
from datetime import timedelta
from enum import StrEnum
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as shared
from safetensors import safe_open
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from npr_common.errors import DataLossError, FailedPreconditionError, NprError, UnavailableError
from npr_common.threads import in_own_thread
from npr_rollout.sglang.client import SglangClient
from npr_rollout.sglang.transport import Transport

PARTIAL = "partial"
"""Stamp of a server that has some of a policy's weights."""

PART_BYTES = 1 << 27
"""How much is sent at once; a tensor that is larger goes by itself."""

_GROUP_SECONDS = 120.0  # to meet, and for one tensor
_SAYS_WHY_SECONDS = 5.0  # for the server to tell why our half of a collective has failed

Part = list[tuple[str, Tensor]]


class WeightWay(StrEnum):
    """How weights get into a running server; see the module's docstring."""

    DISK = "disk"
    TENSORS = "tensors"
    GROUP = "group"


class Weights(ABC):
    """Changes a server's weights. Nothing is in flight when it is called."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def load(self, folder: Path, stamp: str) -> None:
        """Serve the weights in a folder. After an error the stamp is `PARTIAL`, where the server still says anything.

        Raises:
            FailedPreconditionError: the server can't serve them, or they can't be handed over this way.
            DataLossError: the files can't be read.
            UnavailableError: the server does not answer.
        """
        self._transport.ask(lambda client: client.flush())
        self._transport.ask(lambda client: client.mark(PARTIAL))
        self._send(folder)
        self._transport.ask(lambda client: client.mark(stamp))

    @abstractmethod
    def _send(self, folder: Path) -> None: ...


class FromDisk(Weights):
    """The server reads the files."""

    def _send(self, folder: Path) -> None:
        self._transport.ask(lambda client: client.load(str(folder)))


class FromTensors(Weights):
    """The tensors are handed over in shared memory, one part after the other."""

    def __init__(self, transport: Transport, workers: int, part_bytes: int = PART_BYTES) -> None:
        """`workers`: how many processes share the model; each opens the same memory."""
        super().__init__(transport)
        self._workers = workers
        self._part_bytes = part_bytes

    def _send(self, folder: Path) -> None:
        with _session(self._transport):
            for part in read_parts(folder, self._part_bytes):
                handles = [_handles(part) for _ in range(self._workers)]
                self._transport.ask(partial(SglangClient.load_tensors, handles=handles))
                del part  # before the next one is read


class FromGroup(Weights):
    """The tensors are broadcast; this process is rank 0, the server's workers are the ranks behind it."""

    def __init__(
        self, transport: Transport, workers: int, backend: str, address: str, part_bytes: int = PART_BYTES
    ) -> None:
        """
        Args:
            workers: how many processes share the model.
            backend: of `torch.distributed`: `gloo`, or `nccl` where this process has a GPU of its own.
            address: of this host, as the server reaches it.
        """
        super().__init__(transport)
        self._workers = workers
        self._backend = backend
        self._address = address
        self._part_bytes = part_bytes

    def _send(self, folder: Path) -> None:
        """A group lives for one load: a server that was started again in between would not know of it."""
        group = self._transport.ask(lambda client: _Group.join(client, self._workers, self._backend, self._address))
        try:
            with _session(self._transport):
                for part in read_parts(folder, self._part_bytes):
                    self._transport.ask(partial(group.send, part=part))
                    del part  # before the next one is read
        finally:
            with contextlib.suppress(NprError):  # a server that is gone has left it
                self._transport.ask(group.dismiss)
            group.leave()


@contextlib.contextmanager
def _session(transport: Transport) -> Iterator[None]:
    """Tensors may be handed over within the block. After an error the server's session stays open, for the next one."""
    has_sessions = transport.ask(SglangClient.begin_session)
    yield
    if has_sessions:
        transport.ask(SglangClient.end_session)


class _Group:
    """A `torch.distributed` group with a server's workers."""

    def __init__(self, name: str, group: Any, device: torch.device) -> None:
        self._name = name
        self._group = group
        self._device = device

    @classmethod
    async def join(cls, client: SglangClient, workers: int, backend: str, address: str) -> _Group:
        """Meet the workers at a port that is free."""
        name = f"npr-{uuid.uuid4().hex[:12]}"
        store = _store(address, 1 + workers)
        ours = in_own_thread(_new_group, store, name, 1 + workers, backend)
        theirs = client.join_group(name, address, store.port, 1 + workers, backend)
        group = await _both(ours, theirs)
        device = torch.device("cuda" if backend == "nccl" else "cpu")
        return cls(name, group, device)

    async def send(self, client: SglangClient, part: Part) -> None:
        """Broadcast some tensors; the server loads them."""
        await _both(in_own_thread(self._broadcast, part), client.load_from_group(self._name, part))

    async def dismiss(self, client: SglangClient) -> None:
        """Have the server leave the group."""
        await client.leave_group(self._name)

    def leave(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)

    def _broadcast(self, part: Part) -> None:
        for _, tensor in part:
            dist.broadcast(tensor.to(self._device).contiguous(), src=0, group=self._group)


async def _both(ours: Awaitable[Any], theirs: Awaitable[None]) -> Any:
    """What came of our half of a collective. An error of the server's half says more than what it does to ours.

    Nothing stops our half but its timeout, where the server never comes to take part in it.
    """
    one, other = asyncio.ensure_future(ours), asyncio.ensure_future(theirs)
    one.add_done_callback(_look_at)
    await asyncio.wait({one, other}, return_when=asyncio.FIRST_EXCEPTION)
    if not other.done():
        await asyncio.wait({other}, timeout=_SAYS_WHY_SECONDS)
    if other.done():
        other.result()
    other.cancel()
    try:
        return await one
    except (RuntimeError, dist.DistError) as error:
        raise UnavailableError(f"The weights can't be broadcast to the SGLang server: {error}") from error


def _look_at(future: asyncio.Future[Any]) -> None:
    """So that nobody is told that an error was never looked at."""
    if not future.cancelled():
        future.exception()


def _store(address: str, size: int) -> TCPStore:
    """Where a group of so many meets: a port that was free, at this address only."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(place)
            listener.listen()
            port = listener.getsockname()[1]
            # The store takes a socket that is bound over; by itself it would listen at all addresses of the host.
            return TCPStore(
                address,
                port,
                size,
                is_master=True,
                wait_for_workers=False,
                timeout=_timeout(),
                master_listen_fd=listener.detach(),
            )
    except OSError as error:
        message = f"NPR_SGLANG_GROUP_ADDRESS is {address!r}, where this process can't listen: {error}"
        raise FailedPreconditionError(message) from error


def _new_group(store: Any, name: str, size: int, backend: str) -> Any:
    """Rank 0 of a group beside any default one, by the same private function as the server's: their keys must agree."""
    from torch.distributed.distributed_c10d import (  # noqa: PLC0415 - private, and needed here alone
        Backend,
        GroupName,
        _new_process_group_helper,
        _world,
    )

    group, _ = _new_process_group_helper(
        size, 0, [], Backend(backend), PrefixStore(name, store), group_name=GroupName(name), timeout=_timeout()
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _timeout() -> timedelta:
    return timedelta(seconds=_GROUP_SECONDS)


def read_parts(folder: Path, part_bytes: int) -> Iterator[Part]:
    """The tensors of a folder's safetensors files, some at a time: about `part_bytes`, and at least one.

    Raises:
        FailedPreconditionError: the folder holds no safetensors files.
        DataLossError: one of them can't be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FailedPreconditionError(f"{folder} holds no safetensors files: publish the policy as such.")
    part: Part = []
    size = 0
    for name, tensor in itertools.chain.from_iterable(map(_read, files)):
        if part and size + tensor.nbytes > part_bytes:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    if part:
        yield part


def _read(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name)
    except Exception as error:  # whatever the bytes make of the library
        raise DataLossError(f"{path} can't be read: {error}") from error


def _handles(part: Part) -> str:
    """Tensors in shared memory, as a server opens them: pickled names and places of the memory, in base64."""
    buffer = io.BytesIO()
    try:
        with _named_memory():
            ForkingPickler(buffer).dump([(name, tensor.share_memory_()) for name, tensor in part])  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        size = sum(tensor.nbytes for _, tensor in part) >> 20
        message = (
            f"{size} MiB of weights don't fit into shared memory (/dev/shm): {error}; give it more, or load by disk"
        )
        raise FailedPreconditionError(message) from error
    return base64.b64encode(buffer.getvalue()).decode("ascii")


@contextlib.contextmanager
def _named_memory() -> Iterator[None]:
    """Memory is shared by name: file descriptors could be handed only to a child that knows this process's key."""
    before = shared.get_sharing_strategy()  # type: ignore[no-untyped-call]
    shared.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        shared.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


def make_weights(way: WeightWay, transport: Transport, workers: int, backend: str, address: str) -> Weights:
    """The way that is asked for; see `FromGroup` for what the arguments mean."""
    if way is WeightWay.DISK:
        return FromDisk(transport)
    if way is WeightWay.TENSORS:
        return FromTensors(transport, workers)
    return FromGroup(transport, workers, backend, address)
