"""Statistics against their closed forms."""

from math import comb, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npr_controller.statistics import avg_at_k, best_at_k, bootstrap_interval, pass_at_k


def table(*counts: int, samples: int) -> np.ndarray:
    """A table of problems with so many correct samples each."""
    return np.array([[place < count for place in range(samples)] for count in counts])


def test_avg_and_best_on_a_hand_made_table() -> None:
    correct = table(0, 1, 4, samples=4)
    assert avg_at_k(correct) == pytest.approx(5 / 12)
    assert best_at_k(correct) == pytest.approx(2 / 3)


@given(st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_binomial_formula(case: tuple[int, int, int]) -> None:
    n, c, k = case
    assert pass_at_k(table(c, samples=n), k) == pytest.approx(1 - comb(n - c, k) / comb(n, k))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=10))
def test_pass_at_k_meets_its_ends_and_grows_with_k(counts: list[int]) -> None:
    correct = table(*counts, samples=6)
    values = [pass_at_k(correct, k) for k in range(1, 7)]
    assert values[0] == pytest.approx(avg_at_k(correct))
    assert values[-1] == pytest.approx(best_at_k(correct))
    assert values == sorted(values)


@pytest.mark.parametrize("k", [0, 3])
def test_pass_at_k_needs_k_samples(k: int) -> None:
    with pytest.raises(ValueError, match="1 <= k <= 2"):
        pass_at_k(table(1, samples=2), k)


def test_bootstrap_interval_agrees_with_the_normal_one_for_many_problems() -> None:
    values = np.array([1.0] * 600 + [0.0] * 400)
    interval = bootstrap_interval(values, resamples=4000, confidence=0.95, seed=1)
    half = 1.96 * sqrt(0.6 * 0.4 / 1000)
    assert interval.low == pytest.approx(0.6 - half, abs=0.003)
    assert interval.high == pytest.approx(0.6 + half, abs=0.003)


def test_bootstrap_interval_depends_on_its_seed_alone() -> None:
    values = np.random.default_rng(0).random(50)
    first = bootstrap_interval(values, resamples=500, confidence=0.9, seed=3)
    assert first == bootstrap_interval(values, resamples=500, confidence=0.9, seed=3)
    assert first != bootstrap_interval(values, resamples=500, confidence=0.9, seed=4)


def test_bootstrap_interval_of_equal_values_is_a_point() -> None:
    interval = bootstrap_interval(np.full(7, 0.25), resamples=100, confidence=0.95, seed=0)
    assert (interval.low, interval.high) == (0.25, 0.25)
    with pytest.raises(ValueError, match="at least one problem"):
        bootstrap_interval(np.array([]), resamples=100, confidence=0.95, seed=0)
