"""What fits into a server, and how its pool is shared out before it is used.

Invariants:
- A request that passes fits into the pool when it is alone there, so it will be decoded some day.
- Estimates decide who waits, never what is decoded. The oldest never waits.

All sizes are in tokens: the server's pages hold one each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npr_rollout.record.ledger import ResolvedLimits
from npr_rollout.record.request import Request, SamplingParams
from npr_rollout.record.trajectory import Trajectory
from npr_sglang.contract import BACKEND

_SPARE = 4  # the token beyond the last one that the server makes room for, and what it draws to seal
_WEIGHT = 0.05  # of the latest trajectory in a mean


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """A server's sizes.

    Attributes:
        context: RoPE positions that the model knows.
        pool_tokens: tokens whose keys and values fit.
        input_tokens: longest input, all branches in line.
        max_running: trajectories decoded at once.
        max_branches: of a block, where a request sets no limit; likewise `max_blocks` of a trajectory.
        native: whether the server has the plug-in.
    """

    context: int
    vocab_size: int
    pool_tokens: int
    input_tokens: int
    max_running: int
    max_branches: int
    max_blocks: int
    native: bool = True

    @classmethod
    def told(
        cls,
        info: Mapping[str, Any],
        *,
        context: int,
        vocab_size: int,
        max_running: int,
        max_branches: int,
        max_blocks: int,
    ) -> ServerLimits:
        """The sizes of a server that says `info` of itself (`SglangClient.info`)."""
        return cls(
            context=context,
            vocab_size=vocab_size,
            pool_tokens=int(info["max_total_num_tokens"]),
            input_tokens=int(info["max_req_input_len"]),
            max_running=max_running,
            max_branches=max_branches,
            max_blocks=max_blocks,
            native=info.get("radix_cache_backend") == BACKEND,
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory, all branches in line, that fits."""
        return min(self.pool_tokens, self.input_tokens) - _SPARE

    def resolve(self, request: Request) -> tuple[ResolvedLimits, str]:
        """Limits with defaults filled in, and why they can never be granted (empty when they can)."""
        asked, prompt = request.limits, len(request.prompt_ids)
        room = self.context - prompt
        fits = max(0, self.longest - prompt)
        wanted = asked.max_tokens if asked.max_tokens is not None else self._default_tokens(fits)
        obstacle = "" if self.native else _beyond_a_plain_server(request.sampling)
        if wanted > fits or fits == 0:
            obstacle = (
                f"{prompt} prompt tokens and {max(wanted, 1)} new ones never fit into a pool of {self.pool_tokens} and "
                f"an input of {self.input_tokens} tokens: lower max_tokens to {fits}, or serve with more memory."
            )
        return ResolvedLimits.of(asked, wanted, room, self.max_branches, self.max_blocks), obstacle

    def _default_tokens(self, fits: int) -> int:
        """As much as fits beside the spare token of each branch, or half of it if these are many."""
        return max(fits - self.max_branches - 1, fits // 2)

    def can_ever_pay(self, trajectory: Trajectory, branches: int) -> bool:
        """Whether the rest of a trajectory fits if it has the pool to itself: one spare token a stream."""
        return trajectory.length + trajectory.ledger.remaining + branches + 1 <= min(
            self.pool_tokens, self.input_tokens
        )


def _beyond_a_plain_server(sampling: SamplingParams) -> str:
    """What a server without the plug-in can't do by our rules, as a sentence; empty if it can do all of it.

    It tells log-probabilities after temperature and before truncation, and penalises all that it sees.
    """
    draws = sampling.temperature > 0
    asked = {
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "raw_log_probs": sampling.raw_log_probs and sampling.temperature not in (0.0, 1.0),
        "top_p": draws and sampling.top_p != 1.0,
        "top_k": draws and sampling.top_k != 0,
        "min_p": draws and sampling.min_p != 0.0,
    }
    names = ", ".join(name for name, is_asked in asked.items() if is_asked)
    return (
        f"An SGLang server without the plug-in can't do {names} by our rules: serve with the plug-in." if names else ""
    )


class Expectations:
    """What trajectories are expected to hold in the end, from those that have ended."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._typical = 0.0

    def learn(self, trajectory: Trajectory) -> None:
        """Take note of one that has ended."""
        new = self._typical == 0.0
        self._typical += (1.0 if new else _WEIGHT) * (trajectory.length - self._typical)

    def has_room(self, others: Sequence[Trajectory], newcomer: Trajectory) -> bool:
        """Whether a trajectory is expected to fit beside others; prompts that are shared count once."""
        if len(others) >= self._limits.max_running:
            return False
        prompts = {trajectory.request.prompt_ids for trajectory in (*others, newcomer)}
        expected = sum(map(len, prompts)) + sum(map(self._own, (*others, newcomer)))
        return expected <= self._limits.pool_tokens

    def _own(self, trajectory: Trajectory) -> float:
        """What it will hold besides its prompt, and the spare token of each of its streams."""
        return max(trajectory.length, self._typical) - trajectory.prompt_length + len(trajectory.samplers())
