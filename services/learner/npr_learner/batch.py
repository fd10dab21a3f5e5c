"""Packed rows as tensors on a device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from npr_learner.attention.interface import Attend, AttentionKind
from npr_learner.packing import Family, pack
from npr_learner.row import IntArray


@dataclass(frozen=True)
class Batch:
    """Rows packed into one of S tokens, and the N trained tokens of all of them, flat.

    Attributes:
        token_ids_1S: int64; padding, at the right where the attention asks for any, is 0.
        positions_1S: int64.
        attend: the attention over the row.
        sources_N: int64, index of the token before each trained one.
        targets_N: int64, the trained tokens.
        behavior_log_probs_N: float32.
        advantages_N: float64.
        temperatures_N: float32.
    """

    token_ids_1S: torch.Tensor
    positions_1S: torch.Tensor
    attend: Attend
    sources_N: torch.Tensor
    targets_N: torch.Tensor
    behavior_log_probs_N: torch.Tensor
    advantages_N: torch.Tensor
    temperatures_N: torch.Tensor


def collate(families: Sequence[Family], device: torch.device, kind: AttentionKind | None = None) -> Batch:
    """Packs families into tensors on `device`; `kind` is how attention is computed, None for the device's fastest."""
    kind = kind or AttentionKind.of(device)
    packed = pack(families)
    length = kind.row_length(len(packed.token_ids))
    rows = packed.rows
    counts = [len(row.trained) for row in rows]
    return Batch(
        token_ids_1S=_padded(packed.token_ids, length).to(device),
        positions_1S=_padded(packed.positions, length).to(device),
        attend=kind.prepare(packed.forest, length, device),
        sources_N=torch.from_numpy(packed.sources).to(device),
        targets_N=torch.from_numpy(np.concatenate([row.token_ids[row.trained] for row in rows])).to(device),
        behavior_log_probs_N=torch.from_numpy(np.concatenate([row.behavior_log_probs for row in rows])).to(device),
        advantages_N=_repeated([row.advantage for row in rows], counts, np.float64).to(device),
        temperatures_N=_repeated([row.temperature for row in rows], counts, np.float32).to(device),
    )


def _padded(array: IntArray, length: int) -> torch.Tensor:
    """[1, length]."""
    return torch.from_numpy(np.pad(array, (0, length - len(array))))[None]


def _repeated(values: Sequence[float], counts: Sequence[int], dtype: npt.DTypeLike) -> torch.Tensor:
    return torch.from_numpy(np.repeat(np.asarray(values, dtype), counts))
