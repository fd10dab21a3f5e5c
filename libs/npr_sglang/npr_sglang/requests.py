"""What the plug-in keeps with each of the server's requests.

Invariant: nothing here raises on what a client has sent. A request that is not sound is aborted, as the server aborts
its own: it runs one token of prefill, and its client is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from npr_sglang.contract import INVALID, KEY, ContractError, Params
from npr_sglang.releases import installed

_ATTRIBUTE = "_npr"


@dataclass(slots=True)
class State:
    """A request of our client.

    Attributes:
        namespace: what its own tokens are cached under.
        stitched: whether its context has been put in line.
        sealing: a finish that waits until its last token's keys and values are written.
        said: bool [V], what its body has said; None without a penalty, and before the first draw.
    """

    params: Params
    namespace: str = ""
    stitched: bool = False
    sealing: tuple[Any, int] | None = None
    said: Any = None

    @property
    def has_context(self) -> bool:
        """Whether its input begins with joined blocks."""
        return bool(self.params.context.blocks)


def state_of(request: Any) -> State | None:
    """What is kept with a request of the server; None if our client has not sent it, or it is not sound."""
    try:
        state: State | None = getattr(request, _ATTRIBUTE)
    except AttributeError:
        state = _first_look(request)
        setattr(request, _ATTRIBUTE, state)
    return state


def abort(request: Any, message: str) -> None:
    """Abort a request before it is computed; one token of prefill is all that it costs."""
    request.set_finish_with_abort(message, HTTPStatus.BAD_REQUEST, "BadRequestError")
    request.output_ids = request.output_ids[:0]
    getattr(request, installed().refresh_input)()
    setattr(request, _ATTRIBUTE, None)


def _first_look(request: Any) -> State | None:
    custom = request.sampling_params.custom_params
    if not isinstance(custom, dict) or KEY not in custom:
        return None
    tokens: Sequence[int] = request.origin_input_ids
    try:
        params = Params.from_dict(custom[KEY], len(tokens))
        _check(request, params)
    except ContractError as error:
        abort(request, f"{INVALID}: {error}")
        return None
    context = params.context
    return State(params, context.namespace(tokens, len(context.blocks), request.extra_key or ""))


def _check(request: Any, params: Params) -> None:
    """Raises ContractError for what the server would take, but not do, of a request with these parameters."""
    sampling = request.sampling_params
    if any(token >= request.vocab_size for token in params.script):
        raise ContractError(f"script has tokens beyond the {request.vocab_size} of the model")
    if params.seal and (sampling.n != 1 or sampling.max_new_tokens == 0):
        raise ContractError("seal needs max_new_tokens above 0, and n 1: it is the step behind a request's last token")
    if request.return_logprob and 0 <= request.logprob_start_len < params.context.length:
        raise ContractError(
            f"logprob_start_len {request.logprob_start_len} lies in the context of {params.context.length} tokens, "
            "which is not computed again: begin behind it"
        )
