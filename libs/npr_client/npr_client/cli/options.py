"""Options that many commands share, and how a command gets its client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from npr_client.sdk.addresses import ServiceAddresses
from npr_client.sdk.client import NprClient
from npr_client.stack.layout import STATE_DIR_VARIABLE, StateDir
from npr_common.dialects import Dialect, DialectError, bundled_dialects, load_dialect
from npr_common.errors import InvalidArgumentError
from npr_common.references import absolute_reference

T = TypeVar("T")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
StateDirOption = Annotated[
    Path | None,
    typer.Option("--state-dir", envvar=STATE_DIR_VARIABLE, help="Folder of the local stack.", show_default=".npr"),
]
MinPOption = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Keep tokens this fraction as likely as the likeliest; 0 keeps all.")
]
DialectOption = Annotated[str, typer.Option(help="Dialect of the tags: a bundled name or a YAML file.")]


def absolute_dialect(name: str) -> str:
    """A bundled dialect's name as it is, or a file's path as a service in another folder understands it."""
    return name if name in bundled_dialects() else absolute_reference(name)


def dialect_named(name: str) -> Dialect:
    """A dialect; `InvalidArgumentError` when there is none of that name."""
    try:
        return load_dialect(name)
    except DialectError as error:
        raise InvalidArgumentError(str(error), reason="UNKNOWN_DIALECT") from error


def with_client(state_dir: Path | None, work: Callable[[NprClient], Awaitable[T]]) -> T:
    """Runs `work` with a client of the services that the environment or the local stack names."""
    return asyncio.run(_with_client(ServiceAddresses.resolve(StateDir.at(state_dir)), work))


async def _with_client(addresses: ServiceAddresses, work: Callable[[NprClient], Awaitable[T]]) -> T:
    async with NprClient(addresses) as client:
        return await work(client)
