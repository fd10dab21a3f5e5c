"""What is checked of a request before it is put in line, whoever decodes it.

Invariant: what passes makes sense; whether it fits is for the engine to say, which knows its memory.
"""

from __future__ import annotations

import math
from dataclasses import asdict

from npr_common.errors import InvalidArgumentError
from npr_rollout.record.request import BudgetPolicy, Limits, Request

_LEAST_TEMPERATURE = 1e-3  # logits divided by less overflow
_LEAST_PENALTY = 0.01  # likewise


def check_request(request: Request, context: int, vocab_size: int) -> None:
    """Refuse what can't be right.

    Raises:
        InvalidArgumentError: naming the field and what to do.
    """
    prompt, sampling = request.prompt_ids, request.sampling
    if not prompt:
        _invalid("prompt", "The prompt is empty; send at least one token.")
    if len(prompt) >= context:
        _invalid("prompt", f"The prompt has {len(prompt)} tokens, but the context holds {context}; shorten it.")
    if not all(0 <= token < vocab_size for token in prompt):
        _invalid("prompt", f"A prompt token is not in the vocabulary of {vocab_size}; use the policy's tokenizer.")
    if not (sampling.temperature == 0 or _LEAST_TEMPERATURE <= sampling.temperature < float("inf")):
        message = f"Temperature is {sampling.temperature}; it is 0, which is greedy, or {_LEAST_TEMPERATURE} or more."
        _invalid("sampling.temperature", message)
    if not 0 < sampling.top_p <= 1:
        _invalid("sampling.top_p", f"top_p is {sampling.top_p}; it lies in (0, 1].")
    if sampling.top_k < 0:
        _invalid("sampling.top_k", f"top_k is {sampling.top_k}; 0 keeps all tokens.")
    if not 0 <= sampling.min_p < 1:
        _invalid("sampling.min_p", f"min_p is {sampling.min_p}; it lies in [0, 1), and 0 keeps all tokens.")
    if not _LEAST_PENALTY <= sampling.repetition_penalty <= 1 / _LEAST_PENALTY:
        message = f"The penalty is {sampling.repetition_penalty}; it lies in [{_LEAST_PENALTY}, {1 / _LEAST_PENALTY}]."
        _invalid("sampling.repetition_penalty", message)
    if request.deadline is not None and math.isnan(request.deadline):
        _invalid("deadline", "The deadline is no number.")
    for name, limit in asdict(request.limits).items():
        least = 1 if name.endswith("tokens") else 0
        if limit is not None and limit < least:
            _invalid(f"limits.{name}", f"{name} is {limit}; it is at least {least}.")
    _check_budget(request.budget, request.limits)


def _check_budget(budget: BudgetPolicy, limits: Limits) -> None:
    reserve, early = budget.takeaway_reserve_tokens, budget.early_stop
    if reserve < 0:
        _invalid("budget.takeaway_reserve_tokens", f"The reserve is {reserve} tokens; 0 keeps nothing.")
    if limits.max_tokens is not None and reserve >= limits.max_tokens and reserve > 0:
        message = f"The reserve of {reserve} tokens leaves branches nothing of max_tokens {limits.max_tokens}."
        _invalid("budget.takeaway_reserve_tokens", message)
    if early.quorum < 0:
        _invalid("budget.early_stop.quorum", f"The quorum is {early.quorum} branches; 0 is off.")
    if early.quorum and not 1 <= early.straggler_factor < float("inf"):
        message = f"The factor is {early.straggler_factor}; with a quorum it is at least 1."
        _invalid("budget.early_stop.straggler_factor", message)
    if not early.quorum and early.straggler_factor != 0:
        message = f"The factor is {early.straggler_factor}, but without a quorum nothing is measured; set one."
        _invalid("budget.early_stop.straggler_factor", message)
    if not float("-inf") < early.min_mean_log_prob <= 0:
        message = f"The least mean log-probability is {early.min_mean_log_prob}; it is negative, and 0 is off."
        _invalid("budget.early_stop.min_mean_log_prob", message)


def _invalid(field: str, message: str) -> None:
    raise InvalidArgumentError(message, reason="INVALID_REQUEST", field_violations={field: message})
