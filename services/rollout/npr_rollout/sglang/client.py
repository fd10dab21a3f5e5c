"""An SGLang server: streams of tokens, and the control of what it serves.

Invariants:
- It knows streams of tokens; nothing of trajectories.
- Every stream that was begun ends in one `Ended`, whatever becomes of the server. One whose answer breaks off (0.5.20
  and 0.5.23 do that to an abort that meets an unread message) ends in the server too.
- A server that says nothing for long, on any of its streams, is taken for gone, for good.
- An abort reaches its stream: it is told once the server knows the stream, which would not heed an earlier one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import aiohttp
from torch import Tensor

from npr_common.errors import FailedPreconditionError, UnavailableError
from npr_rollout.sglang.wire import Answer, Ask, Ended, Tokens, body_of

_CONTROL_SECONDS = 600.0
_INFO_SECONDS = 60.0
_ABORT_SECONDS = 10.0
_POLL_SECONDS = 0.2
_KEEPALIVE_SECONDS = 1.0  # less than the server's 5: it must not close a connection that is taken up again

SERVER_ENDED = "SERVER_ENDED"
"""Reason of an error: a server's process ended while it started."""

Sink = Callable[[Tokens | Ended], None]


class SglangClient:
    """One server. Made and used in one event loop."""

    def __init__(self, url: str, silence_seconds: float = math.inf) -> None:
        """Connect when that is needed.

        Args:
            silence_seconds: how long the server may say nothing on any stream while some are under way.
        """
        self.url = url.rstrip("/")
        self._silence_seconds = silence_seconds
        self._heard_at = 0.0
        self._is_silent = False
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
            read_bufsize=1 << 20,
        )
        self._known: dict[str, asyncio.Event] = {}  # set once the server knows the stream of that name
        self._quiet = asyncio.Event()  # set while no stream is known
        self._quiet.set()

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    # --- decoding ---

    async def stream(self, asks: Sequence[Ask], sink: Sink) -> None:
        """Decode streams that begin together; the sink gets what comes of each, and its end."""
        answer, known, why = Answer(asks), asyncio.Event(), "Its client was closed."
        if self._quiet.is_set():
            self._heard_at = time.monotonic()
            self._quiet.clear()
        self._known |= dict.fromkeys((ask.name for ask in asks), known)
        try:
            why = await self._unless_silent(self._receive(asks, answer, known, sink))
            if answer.unended and await self.is_healthy():  # it decodes them still, for nobody
                await self.abort(answer.unended)
                _pass_on(answer.broken(why), sink)
        finally:
            for ask in asks:
                del self._known[ask.name]
            if not self._known:
                self._quiet.set()
            _pass_on(answer.lost(why), sink)

    async def _unless_silent(self, receiving: Coroutine[None, None, str]) -> str:
        """What `receiving` returns, or that the server is silent."""
        task = asyncio.ensure_future(receiving)
        try:
            while not task.done():
                left = self._heard_at + self._silence_seconds - time.monotonic()
                if left <= 0:
                    self._is_silent = True
                    return f"It has said nothing for {self._silence_seconds:.0f} s."
                await asyncio.wait({task}, timeout=None if math.isinf(left) else left)
            return task.result()
        finally:
            task.cancel()

    async def _receive(self, asks: Sequence[Ask], answer: Answer, known: asyncio.Event, sink: Sink) -> str:
        """Pass on what comes of streams; why nothing more does."""
        try:
            async with self._session.post(f"{self.url}/generate", json=body_of(asks)) as response:
                known.set()
                if response.status != HTTPStatus.OK:
                    _pass_on(answer.refused(await response.text()), sink)
                async for message in _messages(response):
                    self._heard_at = time.monotonic()
                    _pass_on(answer.take(message), sink)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            known.set()
        return "The server closed the stream."

    async def abort(self, names: Iterable[str]) -> None:
        """Abort streams. Says nothing: their ends do, or the server is gone."""
        await asyncio.gather(*map(self._abort, names))

    async def _abort(self, name: str) -> None:
        if (known := self._known.get(name)) is not None:
            await known.wait()
            with contextlib.suppress(UnavailableError):
                await self._post("/abort_request", {"rid": name}, _ABORT_SECONDS)

    # --- control ---

    async def end_streams(self) -> None:
        """Abort all streams; returns once they have ended. Raises UnavailableError when they don't."""
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await self.abort(list(self._known))
                await self._quiet.wait()
        except TimeoutError as error:
            raise UnavailableError(f"The SGLang server at {self.url} does not end its streams.") from error

    async def is_healthy(self) -> bool:
        """Whether the server answers."""
        if self._is_silent:
            return False
        try:
            async with self._session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status == HTTPStatus.OK
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def info(self) -> Mapping[str, Any]:
        """What the server says of itself: its settings, and the state of its (first) scheduler."""
        told = await self._get("/server_info")
        return {**told, **(told.get("internal_states") or [{}])[0]}

    async def log_probs(self, tokens: Sequence[int], wanted: Sequence[int]) -> list[float]:
        """Log-probabilities under the model's own softmax of the ids `wanted`, after the input `tokens`."""
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "token_ids_logprob": list(wanted),
        }
        told: dict[str, Any] = json.loads(await self._post("/generate", body, _CONTROL_SECONDS))
        found = {token: value for value, token, *_ in told["meta_info"]["output_token_ids_logprobs"][0]}
        return [found[token] for token in wanted]

    async def flush(self) -> None:
        """Forget all keys and values, once nothing runs any more."""
        await self._post(f"/flush_cache?timeout={_CONTROL_SECONDS:.0f}", None, _CONTROL_SECONDS)

    async def mark(self, version: str) -> None:
        """Have the server say from now on that its weights are of this version."""
        await self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False}, _INFO_SECONDS)

    async def load(self, folder: str) -> None:
        """Serve the weights in a folder; the cache is flushed.

        Raises:
            FailedPreconditionError: the server can't serve them; what it serves now is not known.
        """
        body = {"model_path": folder, "flush_cache": True, "abort_all_requests": False}
        await self._post("/update_weights_from_disk", body, _CONTROL_SECONDS)

    async def load_tensors(self, handles: list[str]) -> None:
        """Serve tensors in shared memory, one handle a worker. Raises as `load`."""
        body = {"serialized_named_tensors": handles, "flush_cache": True}
        await self._post("/update_weights_from_tensor", body, _CONTROL_SECONDS)

    async def join_group(self, name: str, address: str, port: int, size: int, backend: str) -> None:
        """Have the workers join a `torch.distributed` group as the ranks behind 0. Raises as `load`."""
        body = {
            "group_name": name,
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": size,
            "backend": backend,
        }
        await self._post("/init_weights_update_group", body, _CONTROL_SECONDS)

    async def begin_session(self) -> bool:
        """Begin to hand over tensors; whether the server has such sessions, which newer releases want.

        One that was left open after an error is ended first. Raises as `load`.
        """
        status, _ = await self._send("/end_weight_update", {}, _CONTROL_SECONDS)
        if status == HTTPStatus.NOT_FOUND:
            return False
        await self._post("/begin_weight_update", {}, _CONTROL_SECONDS)
        return True

    async def end_session(self) -> None:
        """All tensors have been handed over. Raises as `load`."""
        await self._post("/end_weight_update", {}, _CONTROL_SECONDS)

    async def leave_group(self, name: str) -> None:
        """Have the workers leave a group."""
        await self._post("/destroy_weights_update_group", {"group_name": name}, _INFO_SECONDS)

    async def load_from_group(self, name: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Have the workers receive tensors, which rank 0 sends in this order, and serve them. Raises as `load`."""
        body = {
            "group_name": name,
            "names": [tensor_name for tensor_name, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "flush_cache": True,
        }
        await self._post("/update_weights_from_distributed", body, _CONTROL_SECONDS)

    async def weight_version(self) -> str:
        """What it was marked with last."""
        return str((await self._get("/model_info"))["weight_version"])

    async def release_memory(self) -> None:
        """Give back the memory of weights, keys and values; nothing may be in flight."""
        await self._post("/release_memory_occupation", {}, _CONTROL_SECONDS)

    async def resume_memory(self) -> None:
        """Take back the memory that was given; what the weights are then is not known."""
        await self._post("/resume_memory_occupation", {}, _CONTROL_SECONDS)

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            timeout = aiohttp.ClientTimeout(total=_INFO_SECONDS)
            async with self._session.get(f"{self.url}{path}", timeout=timeout) as answer:
                answer.raise_for_status()
                told: dict[str, Any] = await answer.json(content_type=None)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise UnavailableError(f"The SGLang server at {self.url} does not answer {path}: {_why(error)}") from error
        return told

    async def _post(self, path: str, body: Mapping[str, Any] | None, seconds: float) -> str:
        status, text = await self._send(path, body, seconds)
        if status != HTTPStatus.OK:
            raise FailedPreconditionError(f"The SGLang server refuses {path}: {text[:500]}")
        return text

    async def _send(self, path: str, body: Mapping[str, Any] | None, seconds: float) -> tuple[int, str]:
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with self._session.post(f"{self.url}{path}", json=body, timeout=timeout) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnavailableError(f"The SGLang server at {self.url} does not answer {path}: {_why(error)}") from error


def _why(error: Exception) -> str:
    """A timeout says nothing of itself."""
    return str(error) or type(error).__name__


def _pass_on(items: Iterable[Tokens | Ended], sink: Sink) -> None:
    for item in items:
        sink(item)


async def _messages(answer: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    """The server-sent events of an answer."""
    async for line in answer.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            message: dict[str, Any] = json.loads(line[6:])
            yield message


async def wait_until_healthy(client: SglangClient, is_alive: Callable[[], bool], seconds: float) -> None:
    """Returns when the server answers.

    Raises:
        UnavailableError: its process has ended (`SERVER_ENDED`), or the time is up.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not await client.is_healthy():
        if not is_alive():
            raise UnavailableError("The SGLang server ended while it started.", reason=SERVER_ENDED)
        if loop.time() > end:
            raise UnavailableError(f"The SGLang server did not answer within {seconds:.0f} s; its log says why.")
        await asyncio.sleep(_POLL_SECONDS)
