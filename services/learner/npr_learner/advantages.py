"""How good a response is against the others: the group and batch statistics of DAPO and PAPO.

Invariants:
- Standard deviations are those of a population (divided by n): a lone response has 0, not an undefined one.
- A group that doesn't differ within itself has advantage 0 throughout, so has a lone survivor of the structural filter.
- What is passed in is what was kept: unscorable and filtered responses are gone before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def dapo_advantages(rewards: Sequence[float], groups: Sequence[str], epsilon: float) -> FloatArray:
    """A_i = (R_i - mean of its group) / (std of its group + epsilon), one per response.

    Source: SPEC section 5, stage 1 (DAPO, equation 9).
    """
    batch = _Groups.of(groups)
    centred_R = batch.centre(np.asarray(rewards, np.float64))
    std_G = np.sqrt(batch.means(centred_R**2))
    return centred_R / (std_G[batch.group_R] + epsilon)


def papo_advantages(rewards: Sequence[float], groups: Sequence[str], epsilon: float) -> FloatArray:
    """A_i = (R_i - mean of its group) / (std over *all* responses of the batch + epsilon), one per response.

    Source: SPEC section 5, stage 3. The std is that of the rewards as they are, computed once for the whole batch.
    """
    rewards_R = np.asarray(rewards, np.float64)
    std = float(rewards_R.std())
    return _Groups.of(groups).centre(rewards_R) / (std + epsilon)


@dataclass(frozen=True)
class _Groups:
    """Which responses belong together: for each response its group, for each group its first response and size."""

    group_R: npt.NDArray[np.intp]
    first_G: npt.NDArray[np.intp]
    size_G: npt.NDArray[np.intp]

    @classmethod
    def of(cls, names: Sequence[str]) -> Self:
        _, first_G, group_R, size_G = np.unique(
            np.asarray(names, np.str_), return_index=True, return_inverse=True, return_counts=True
        )
        return cls(group_R, first_G, size_G)

    def means(self, values_R: FloatArray) -> FloatArray:
        """The mean of each group."""
        sums_G = np.zeros(len(self.size_G), np.float64)
        np.add.at(sums_G, self.group_R, values_R)
        return sums_G / self.size_G

    def centre(self, values_R: FloatArray) -> FloatArray:
        """The values less their group's mean. Exactly 0 in a group of equals: rounding starts from its first member."""
        shifted_R = values_R - values_R[self.first_G][self.group_R]
        return shifted_R - self.means(shifted_R)[self.group_R]
