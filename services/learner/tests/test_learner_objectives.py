"""The objectives against the formulas, written out token by token in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npr_learner.advantages import dapo_advantages, papo_advantages
from npr_learner.log_probs import chosen_log_probs
from npr_learner.objectives import (
    ClipRange,
    dapo_loss,
    grpo_clip,
    grpo_weights,
    overlong_penalty,
    papo_loss,
    sft_loss,
)


def reference_dapo(log_prob: float, behavior: float, advantage: float, clip: ClipRange) -> tuple[float, float]:
    """One token's surrogate and its derivative with respect to the log-probability, by cases."""
    ratio = math.exp(log_prob - behavior)
    if advantage >= 0:
        return (ratio * advantage, ratio * advantage) if ratio <= 1 + clip.high else ((1 + clip.high) * advantage, 0.0)
    if ratio < 1 - clip.low:
        return (1 - clip.low) * advantage, 0.0
    if ratio > clip.dual:
        return clip.dual * advantage, 0.0
    return ratio * advantage, ratio * advantage


# Ratios well inside each region of the clip, none on its edges, where the derivative is a convention.
ratios = st.sampled_from([0.05, 0.5, 0.79, 0.81, 1.0, 1.1, 1.27, 1.29, 3.0, 9.9, 10.1, 50.0])
tokens = st.lists(st.tuples(st.floats(-8, -0.01), ratios, st.sampled_from([-2.0, -0.3, 0.0, 0.3, 2.0])), min_size=1)


@given(tokens)
def test_dapo_loss_and_gradient_follow_the_cases(drawn: list[tuple[float, float, float]]) -> None:
    clip = ClipRange()
    log_probs = torch.tensor([log_prob for log_prob, _, _ in drawn], dtype=torch.float64, requires_grad=True)
    behavior = log_probs.detach() - torch.tensor([math.log(ratio) for _, ratio, _ in drawn], dtype=torch.float64)
    advantages = torch.tensor([advantage for *_, advantage in drawn], dtype=torch.float64)
    terms = dapo_loss(log_probs, behavior, advantages, 7.0, clip)
    terms.loss.backward()
    cases = [
        reference_dapo(*item, clip)
        for item in zip(log_probs.tolist(), behavior.tolist(), advantages.tolist(), strict=True)
    ]
    assert terms.loss.item() == pytest.approx(-sum(value for value, _ in cases) / 7.0, rel=1e-12, abs=1e-12)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-slope / 7.0 for _, slope in cases], rel=1e-12, abs=1e-12)
    stopped = sum(slope == 0 and advantage != 0 for (_, slope), (*_, advantage) in zip(cases, drawn, strict=True))
    assert terms.sums["clip_fraction"].item() == stopped


def test_grpo_is_the_mean_over_responses_of_each_ones_mean() -> None:
    """Written out response by response, with one clip for both sides and none against the worst ratios."""
    generator = np.random.default_rng(3)
    lengths, advantages = [1, 4, 9], [1.5, -0.7, 0.2]
    log_probs = torch.tensor(-generator.uniform(0.1, 3, sum(lengths)), requires_grad=True)
    behavior = log_probs.detach() - torch.tensor(generator.uniform(-4, 4, sum(lengths)))
    expected = torch.zeros((), dtype=torch.float64)
    for part, drawn, advantage in zip(log_probs.split(lengths), behavior.split(lengths), advantages, strict=True):
        ratio = (part - drawn).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        expected = expected - surrogate.mean() / len(lengths)
    (slopes,) = torch.autograd.grad(expected, log_probs)

    weighed = torch.tensor(np.repeat(np.array(advantages) * grpo_weights(lengths), lengths))
    loss = dapo_loss(log_probs, behavior, weighed, sum(lengths), grpo_clip(0.2)).loss
    (found,) = torch.autograd.grad(loss, log_probs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(found, slopes, rtol=1e-12, atol=1e-15)


def test_papo_gradient_is_advantage_times_that_of_log_pi() -> None:
    log_probs = torch.tensor([-0.1, -9.0, -700.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64)
    loss = papo_loss(log_probs, advantages, 4.0).loss
    loss.backward()
    assert loss.item() == pytest.approx(-(1.5 - 0.5 + 2.0) / 4.0)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-1.5 / 4, 0.5 / 4, -2.0 / 4])


def test_sft_loss_is_the_negative_log_likelihood_over_a_constant() -> None:
    log_probs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    terms = sft_loss(log_probs, 8.0)
    assert terms.loss.item() == pytest.approx(3.0 / 8.0)
    assert terms.sums["nll"].item() == pytest.approx(3.0)


def test_dapo_advantages_normalise_within_the_group() -> None:
    advantages = dapo_advantages([1.0, -1.0, -1.0, 0.3, 0.3], ["a", "a", "b", "c", "c"], 1e-6)
    assert advantages[:2] == pytest.approx([1.0, -1.0], rel=1e-5)
    assert advantages[2:].tolist() == [0.0, 0.0, 0.0]


def test_papo_advantages_divide_by_the_batch_and_leave_a_lone_survivor_at_zero() -> None:
    rewards, groups = [1.0, -1.0, 1.0, 1.0, -1.0], ["a", "a", "a", "b", "c"]
    std = np.std(rewards)
    expected = [(1 - 1 / 3) / std, (-1 - 1 / 3) / std, (1 - 1 / 3) / std, 0.0, 0.0]
    advantages = papo_advantages(rewards, groups, 1e-9)
    assert advantages == pytest.approx(expected)
    assert advantages[3:].tolist() == [0.0, 0.0]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-2, 1)), min_size=1, max_size=30))
def test_advantages_do_not_depend_on_order(drawn: list[tuple[str, float]]) -> None:
    order = np.random.default_rng(0).permutation(len(drawn))
    for advantages in (dapo_advantages, papo_advantages):
        plain = advantages([reward for _, reward in drawn], [group for group, _ in drawn], 1e-2)
        moved = advantages([drawn[i][1] for i in order], [drawn[i][0] for i in order], 1e-2)
        assert moved == pytest.approx(plain[order], abs=1e-9)
        for name in "abc":
            members = [i for i, (group, _) in enumerate(drawn) if group == name]
            assert abs(plain[members].sum()) < 1e-9


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (120, -1.0)]
)
def test_overlong_penalty_is_linear_in_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 100, 20) == pytest.approx(penalty)
    assert overlong_penalty(length, 100, 0) == 0.0


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(2, 7), st.integers(1, 40))
def test_chunked_log_probs_equal_autograd_through_the_full_softmax(count: int, vocabulary: int, chunk: int) -> None:
    generator = torch.Generator().manual_seed(count * 100 + vocabulary)
    hidden = torch.randn(count, 5, dtype=torch.float64, generator=generator).requires_grad_()
    head = torch.randn(vocabulary, 5, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(vocabulary, (count,), generator=generator)
    weights = torch.randn(count, dtype=torch.float64, generator=generator)
    log_probs, entropy = chosen_log_probs(hidden, head, targets, chunk)
    full = torch.log_softmax(hidden @ head.T, -1)
    torch.testing.assert_close(log_probs, full[torch.arange(count), targets], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1).detach(), rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad((full[torch.arange(count), targets] * weights).sum(), (hidden, head))
    actual = torch.autograd.grad((log_probs * weights).sum(), (hidden, head))
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)
