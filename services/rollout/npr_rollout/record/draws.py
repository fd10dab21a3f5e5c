"""What fixes a trajectory's random draws.

Invariant: a draw depends on the request's seed and prompt, the branch and the position, and on nothing else. Whoever
draws, here or in a server, hashes the same numbers, so equal logits give equal tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def draw_key(seed: int, prompt_ids: Sequence[int]) -> int:
    """64 bits that fix a trajectory's draws. The prompt is part of them, so prompts with one seed are independent."""
    content = np.asarray(prompt_ids, np.int64).tobytes() + (seed & (2**64 - 1)).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
