"""Measures of repeated sampling: avg@k, best@k, unbiased pass@k, bootstrap intervals.

A table of verdicts is `correct_PK`: one row a problem, one column a sample, True where the answer was right.
Everything is a pure function of its arguments; the bootstrap draws from its own seeded generator.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Interval:
    """A two-sided interval."""

    low: float
    high: float


def avg_at_k(correct_PK: NDArray[np.bool_]) -> float:  # noqa: N803 - axis suffix
    """The mean accuracy over all samples of all problems."""
    return float(_checked(correct_PK).mean())


def best_at_k(correct_PK: NDArray[np.bool_]) -> float:  # noqa: N803
    """The share of problems with at least one correct sample."""
    return float(_checked(correct_PK).any(axis=1).mean())


def pass_at_k(correct_PK: NDArray[np.bool_], k: int) -> float:  # noqa: N803
    """The unbiased estimate of P(one of k samples is correct), 1 - C(n-c, k) / C(n, k) a problem.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1, in its product form
    1 - prod_{i = n-c+1..n} (1 - k/i), which doesn't overflow. Raises `ValueError` unless 1 <= k <= n.
    """
    samples = _checked(correct_PK).shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= {samples} samples a problem")
    return float(np.mean([_pass_at_k(samples, int(count), k) for count in correct_PK.sum(axis=1)]))


def bootstrap_interval(
    values_P: NDArray[np.float64],  # noqa: N803
    *,
    resamples: int,
    confidence: float,
    seed: int,
) -> Interval:
    """The percentile bootstrap interval of a mean over problems.

    Problems are resampled, not samples: those of one problem are not independent. Source: Efron & Tibshirani 1993,
    "An Introduction to the Bootstrap", section 13.3. Raises `ValueError` for no problem.
    """
    if values_P.size == 0:
        raise ValueError("an interval needs at least one problem")
    generator = np.random.default_rng(seed)
    count = values_P.size
    means = np.empty(resamples)
    for index in range(resamples):  # one row at a time: a resamples x problems table may not fit
        means[index] = values_P[generator.integers(0, count, count)].mean()
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return Interval(float(low), float(high))


def _pass_at_k(n: int, c: int, k: int) -> float:
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def _checked(correct_PK: NDArray[np.bool_]) -> NDArray[np.bool_]:  # noqa: N803
    if correct_PK.ndim != 2 or correct_PK.size == 0:
        raise ValueError("verdicts are a table of problems x samples, at least one of each")
    return correct_PK
