"""The wire to an SGLang server: requests out, tokens in.

Invariants:
- It knows streams of tokens; nothing of trajectories.
- Every stream that was begun ends in one `Ended`, whatever becomes of the server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import aiohttp
from torch import Tensor

from npr_common.errors import FailedPreconditionError, UnavailableError
from npr_rollout.record.request import SamplingParams
from npr_rollout.record.trajectory import Drawn
from npr_sglang.contract import EVICTED, INVALID, KEY, NO_ROOM, Params

_RAW = "npr_raw_log_probs"
_ALL_TOKENS = -1  # what the server takes for no top_k
_CONTROL_SECONDS = 600.0
_INFO_SECONDS = 60.0
_ABORT_SECONDS = 10.0
_KEEPALIVE_SECONDS = 1.0  # less than the server's 5: it must not close a connection that is taken up again


class End(Enum):
    """Why a stream ended."""

    STOPPED = "stopped"
    """At one of its stop ids."""
    LENGTH = "length"
    """It has as many tokens as it asked for."""
    ABORTED = "aborted"
    """Somebody aborted it."""
    EVICTED = "evicted"
    """A branch that it stands on is not in the cache any more."""
    NO_ROOM = "no_room"
    """It never fits into the server's pool."""
    REFUSED = "refused"
    """The server takes it for wrong."""
    LOST = "lost"
    """The server does not answer any more."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A stream to be decoded.

    Attributes:
        name: unique; `abort` takes its beginning.
        tokens: all of its input.
        stop: ids after which it ends.
        params: for the plug-in; None where the server has none.
        at_once: whether each token is to be told as it comes, not some at a time.
    """

    name: str
    tokens: list[int]
    max_tokens: int
    stop: tuple[int, ...]
    sampling: SamplingParams
    params: Params | None
    at_once: bool = False

    def body(self) -> dict[str, Any]:
        """As the server takes it."""
        sampling = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k or _ALL_TOKENS,
            "min_p": self.sampling.min_p,
            "max_new_tokens": self.max_tokens,
            "stop_token_ids": list(self.stop),
            "ignore_eos": not self.stop,
        }
        if self.at_once:
            sampling["stream_interval"] = 1
        if self.params is not None:
            sampling["custom_params"] = {KEY: self.params.to_dict()}
        return {
            "rid": self.name,
            "input_ids": self.tokens,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
        }


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of a stream.

    Attributes:
        input_tokens: with the first ones: of its input, `cached_tokens` of which the server did not have to compute.
    """

    name: str
    drawn: list[Drawn]
    input_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a stream.

    Attributes:
        retractions: how often the server took its memory away and computed it again.
    """

    name: str
    end: End
    message: str = ""
    retractions: int = 0


Sink = Callable[[Tokens | Ended], None]


class SglangClient:
    """One server. Made and used in one event loop."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
            read_bufsize=1 << 20,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    # --- decoding ---

    async def stream(self, ask: Ask, sink: Sink) -> None:
        """Decode; the sink gets what comes, and the end."""
        ended = Ended(ask.name, End.LOST, "The server closed the stream.")
        try:
            async with self._session.post(f"{self.url}/generate", json=ask.body()) as answer:
                if answer.status != 200:
                    ended = Ended(ask.name, *_refusal(await answer.text()))
                    return
                taken = 0
                async for message in _messages(answer):
                    drawn, end = _read(ask.name, message, taken)
                    if drawn:
                        sink(Tokens(ask.name, drawn, *(_input(message) if not taken else ())))
                    taken += len(drawn)
                    if end is not None:
                        ended = end
        except (aiohttp.ClientError, OSError, ValueError) as error:
            ended = Ended(ask.name, End.LOST, f"{type(error).__name__}: {error}")
        finally:
            sink(ended)

    async def abort(self, prefix: str) -> None:
        """Abort all streams whose names begin so. Says nothing: their ends do, or the server is gone."""
        try:
            await self._post("/abort_request", {"rid": prefix}, _ABORT_SECONDS)
        except UnavailableError:
            return

    # --- control ---

    async def is_healthy(self) -> bool:
        """Whether the server answers."""
        try:
            async with self._session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status == 200
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
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with self._session.post(f"{self.url}{path}", json=body, timeout=timeout) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnavailableError(f"The SGLang server at {self.url} does not answer {path}: {_why(error)}") from error
        if answer.status != 200:
            raise FailedPreconditionError(f"The SGLang server refuses {path}: {text[:500]}")
        return text


def _why(error: Exception) -> str:
    """A timeout says nothing of itself."""
    return str(error) or type(error).__name__


async def _messages(answer: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    """The server-sent events of an answer."""
    async for line in answer.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            message: dict[str, Any] = json.loads(line[6:])
            yield message


def _read(name: str, message: Mapping[str, Any], taken: int) -> tuple[list[Drawn], Ended | None]:
    """New tokens of a message, and the end. A server may tell all tokens each time, `taken` of which are known."""
    if "error" in message:
        return [], Ended(name, *_refusal(json.dumps(message)))
    meta = message["meta_info"]
    log_probs = meta.get("output_token_logprobs") or []
    raw = meta.get(_RAW) or [0.0] * len(log_probs)
    drawn = [Drawn(token, log_prob, float(r or 0.0)) for (log_prob, token, *_), r in zip(log_probs, raw, strict=False)]
    new = int(meta.get("completion_tokens", taken + len(drawn))) - taken
    drawn = drawn[max(0, len(drawn) - new) :]
    reason = meta.get("finish_reason")
    if reason is None:
        return drawn, None
    end = {"stop": End.STOPPED, "length": End.LENGTH}.get(reason["type"], End.ABORTED)
    text = str(reason.get("message") or "")
    if end is End.ABORTED:
        end = _kind(text, End.ABORTED)
    return drawn, Ended(name, end, text, int(meta.get("num_retractions") or 0))


def _input(message: Mapping[str, Any]) -> tuple[int, int]:
    """How many tokens the server was given, and how many of them it had keys and values of."""
    meta = message["meta_info"]
    return int(meta.get("prompt_tokens") or 0), int(meta.get("cached_tokens") or 0)


def _refusal(text: str) -> tuple[End, str]:
    return _kind(text, End.REFUSED), text[:500]


def _kind(text: str, otherwise: End) -> End:
    for mark, end in ((EVICTED, End.EVICTED), (NO_ROOM, End.NO_ROOM), (INVALID, End.REFUSED)):
        if mark in text:
            return end
    return otherwise


async def wait_until_healthy(client: SglangClient, is_alive: Callable[[], bool], seconds: float) -> None:
    """Returns when the server answers.

    Raises:
        UnavailableError: its process has ended, or the time is up.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not await client.is_healthy():
        if not is_alive():
            raise UnavailableError("The SGLang server ended while it started; its log says why.")
        if loop.time() > end:
            raise UnavailableError(f"The SGLang server did not answer within {seconds:.0f} s; its log says why.")
        await asyncio.sleep(0.2)
