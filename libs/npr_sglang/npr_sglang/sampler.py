"""The server's sampler, by the rules of `npr_sampling`.

Invariants:
- A row of our client is drawn as the engine draws it: same numbers, same order of penalty, temperature and truncation,
  and the log-probability of the distribution it was drawn from.
- Rows of other clients in the same batch get a fresh random number. A batch without any of our rows is the server's own
  business.
- What a body has said is kept on the device, marked as it is drawn: under overlapped scheduling the host learns of a
  token one step late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from npr_sampling import draw_anywhere, penalise, truncate, uniforms
from npr_sglang.contract import FREE
from npr_sglang.requests import State

SAMPLING_ROWS = "npr_rows"
"""Attribute of the server's sampling info that holds a batch's `SamplingRows`."""

RAW_LOG_PROBS = "npr_raw_log_probs"
"""Name of the raw log-probabilities in a request's meta information."""

_ALL = 1 << 20  # the server's top_k for all tokens is larger


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """A batch, as the sampler has to know it.

    Attributes:
        requests: the server's, one a row.
        states: ours, None where a row is another client's.
        positions: RoPE position of each row's token that is to be drawn.
        places: how many tokens each row has drawn already; negative while its input is computed in parts.
        starts: whether the rows begin anew, so that what they have said is to be taken from their tokens.
    """

    requests: list[Any]
    states: list[State | None]
    positions: list[int]
    places: list[int]
    starts: bool

    def scripted(self, row: int) -> int:
        """What a row's script says next; FREE if nothing."""
        state, place = self.states[row], self.places[row]
        if state is None or not 0 <= place < len(state.params.script):
            return FREE
        return state.params.script[place]


@dataclass(frozen=True, slots=True)
class _Rules:
    """What one row asks for, as `npr_sampling` takes it."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, params: Any) -> _Rules:
        """From the server's sampling parameters, where greedy is a top_k of 1."""
        top_k = params.top_k if params.top_k < _ALL else 0
        return cls(0.0 if top_k == 1 else params.temperature, top_k, params.top_p, params.min_p)


def around_sample(
    original: Callable[..., Tensor],
    sampler: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    *others: Any,
    **named: Any,
) -> Tensor:
    """`Sampler.forward`: one token a row, int64 [N]; log-probabilities go into `logits_output`.

    Top and chosen ids' log-probabilities, if any are asked for, stay the server's own, of the unpenalised logits.
    """
    rows: SamplingRows | None = getattr(sampling_info, SAMPLING_ROWS, None)
    if rows is None or len(rows.states) != len(logits_output.next_token_logits):
        return original(sampler, logits_output, sampling_info, return_logprob, *others, **named)
    logits = logits_output.next_token_logits.float()
    if return_logprob and _asks_for_more(*others):  # it works in place, and what it draws is thrown away
        scratch = logits_output.next_token_logits
        logits_output.next_token_logits = scratch.clone()
        original(sampler, logits_output, sampling_info, return_logprob, *others, **named)
        logits_output.next_token_logits = scratch
    if rows.starts:
        _remember(rows, logits)
    rules = [_Rules.of(request.sampling_params) for request in rows.requests]
    temperatures = torch.tensor([rule.temperature for rule in rules], device=logits.device)
    left = truncate(_penalise(logits, rows.states), rules, temperatures)
    numbers = torch.from_numpy(_uniforms(rows)).to(logits.device)
    tokens, log_probs = _follow_scripts(rows, logits, *draw_anywhere(left, temperatures, numbers))
    _mark(rows.states, tokens)
    if return_logprob:
        logits_output.next_token_logprobs = log_probs.to(torch.float32)
    _tell_raw(logits_output, logits, tokens, rows.states)
    sampler._sync_token_ids_across_tp(tokens, sampling_info)
    return tokens


def _asks_for_more(top_logprobs_nums: Sequence[int], token_ids_logprobs: Sequence[Any], *_: Any) -> bool:
    """Whether log-probabilities are wanted of other tokens than the drawn ones."""
    return any(top_logprobs_nums or ()) or any(token_ids_logprobs or ())


def _uniforms(rows: SamplingRows) -> npt.NDArray[np.float64]:
    count = len(rows.states)
    ours = uniforms(
        (state.params.key if state is not None else 0 for state in rows.states),
        (state.params.branch if state is not None else -1 for state in rows.states),
        rows.positions,
        count,
    )
    if all(rows.states):
        return ours
    is_ours = np.array([state is not None for state in rows.states])
    return np.where(is_ours, ours, np.random.default_rng().random(count))


def _penalise(logits: Tensor, states: Sequence[State | None]) -> Tensor:
    rows = [(i, state) for i, state in enumerate(states) if state is not None and state.said is not None]
    return penalise(
        logits, [i for i, _ in rows], [state.said for _, state in rows], [state.params.penalty for _, state in rows]
    )


def _follow_scripts(rows: SamplingRows, logits: Tensor, tokens: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """The same, but what a script says where one has something to say."""
    said = {row: token for row in range(len(rows.states)) if (token := rows.scripted(row)) != FREE}
    if not said:
        return tokens, log_probs
    index = torch.tensor(list(said), device=logits.device)
    chosen = torch.tensor(list(said.values()), device=logits.device)
    values = logits[index].log_softmax(dim=-1).gather(1, chosen[:, None])[:, 0]
    return tokens.index_copy(0, index, chosen), log_probs.index_copy(0, index, values.to(log_probs.dtype))


def _remember(rows: SamplingRows, logits: Tensor) -> None:
    """What the bodies of rows with a penalty have said, from their tokens."""
    for request, state in zip(rows.requests, rows.states, strict=True):
        if state is None or state.params.penalty == 1.0:
            continue
        tokens = request.origin_input_ids + request.output_ids
        count = state.params.said + len(request.output_ids)
        said = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        said[torch.tensor(tokens[len(tokens) - count :], dtype=torch.int64, device=logits.device)] = True
        state.said = said


def _mark(states: Sequence[State | None], tokens: Tensor) -> None:
    for row, state in enumerate(states):
        if state is not None and state.said is not None:
            state.said[tokens[row : row + 1]] = True


def _tell_raw(logits_output: Any, logits: Tensor, tokens: Tensor, states: Sequence[State | None]) -> None:
    if not any(state is not None and state.params.raw_log_probs for state in states):
        return
    raw = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0].tolist()
    logits_output.customized_info = {**(logits_output.customized_info or {}), RAW_LOG_PROBS: raw}
