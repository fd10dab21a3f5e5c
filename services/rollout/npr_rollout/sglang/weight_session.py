"""A session of weight updates, which newer releases of SGLang want around tensors that are handed over.

A release that has no sessions answers 404, and needs none. A session is left open after an error: the server may not
answer any more, and what it has is stamped as partial. The next one closes it first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import aiohttp

from npr_common.errors import FailedPreconditionError, UnavailableError
from npr_rollout.sglang.client import SglangClient
from npr_rollout.sglang.transport import Transport

_SECONDS = 600.0
_BEGIN, _END = "/begin_weight_update", "/end_weight_update"
_OK, _UNKNOWN = 200, 404


@contextlib.contextmanager
def weight_session(transport: Transport) -> Iterator[None]:
    """Tensors may be handed over within the block.

    Raises:
        FailedPreconditionError: the server does not begin a session, or can't use what it was given.
        UnavailableError: the server does not answer.
    """
    status, _ = transport.ask(lambda client: _post(client, _END))
    if status == _UNKNOWN:
        yield
        return
    transport.ask(lambda client: _must(client, _BEGIN))
    yield
    transport.ask(lambda client: _must(client, _END))


async def _must(client: SglangClient, path: str) -> None:
    status, text = await _post(client, path)
    if status != _OK:
        raise FailedPreconditionError(f"The SGLang server refuses {path}: {text[:500]}")


async def _post(client: SglangClient, path: str) -> tuple[int, str]:
    try:
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as http, http.post(f"{client.url}{path}", json={}) as answer:
            return answer.status, await answer.text()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        why = str(error) or type(error).__name__
        raise UnavailableError(f"The SGLang server at {client.url} does not answer {path}: {why}") from error
