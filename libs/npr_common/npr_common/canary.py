"""What a policy must say to one fixed prompt: published with it, and checked by an engine before it serves it.

A file's hash says that the bytes are those that were published. The canary says that they are read, laid out and
multiplied as they were meant: it is computed where the policy is published, by plain `transformers`, and again by the
engine's own kernels.

Invariant: the prompt follows from the size of the vocabulary alone.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_TOKENS = 32
"""Long enough for several KV pages and chunks of a prefill."""

_LIKELIEST = 8  # the tail is where rounding is largest, and tells least

TokenIds = Annotated[tuple[int, ...], Field(min_length=1, max_length=MAX_TOKENS)]


class Canary(BaseModel):
    """A prompt, and the log-probabilities of the likeliest tokens after it.

    Attributes:
        token_ids: the prompt.
        likeliest: ids of the likeliest next tokens, likeliest first.
        log_probs: one for each of them: natural logarithms at temperature 1, computed in float32.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    token_ids: TokenIds
    likeliest: TokenIds
    log_probs: tuple[float, ...]

    @model_validator(mode="after")
    def _check_lengths(self) -> Canary:
        if len(self.log_probs) != len(self.likeliest):
            raise ValueError(f"{len(self.likeliest)} tokens, but {len(self.log_probs)} log-probabilities")
        return self

    @classmethod
    def of(cls, token_ids: tuple[int, ...], log_probs: npt.NDArray[np.float32]) -> Canary:
        """The canary of a policy that gives `log_probs` [V] after the prompt."""
        likeliest = np.argsort(-log_probs, kind="stable")[:_LIKELIEST].tolist()
        return cls(token_ids=token_ids, likeliest=likeliest, log_probs=log_probs[likeliest].tolist())

    def deviation(self, log_probs: npt.NDArray[np.float32]) -> float:
        """How far log-probabilities [V] are off at most, in nats; infinite where they are no numbers or too few."""
        if len(log_probs) <= max(self.likeliest):
            return float("inf")
        off = np.abs(log_probs[list(self.likeliest)] - np.asarray(self.log_probs, np.float32)).max()
        return float(off) if np.isfinite(off) else float("inf")


def canary_token_ids(vocabulary: int, context: int) -> tuple[int, ...]:
    """A prompt of tokens that are spread over the vocabulary, and that leaves room for one more in the context."""
    length = max(1, min(MAX_TOKENS, context - 1))
    return tuple(_hash(index) % vocabulary for index in range(length))


def canary_prompt(model: Any) -> tuple[int, ...]:
    """The prompt for a `transformers` model."""
    return canary_token_ids(
        int(model.get_input_embeddings().weight.shape[0]), int(model.config.max_position_embeddings)
    )


def _hash(index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"npr canary {index}".encode()).digest()[:8])
