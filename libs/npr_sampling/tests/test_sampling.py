"""From logits to tokens: each rule by itself; what the engine makes of them is tested with the engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from npr_sampling import draw_anywhere, draw_key, penalise, truncate, uniforms


@dataclass
class Rules:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def test_numbers_are_uniform_and_depend_on_key_branch_and_position() -> None:
    count = 60_000
    drawn = uniforms([7] * count, [-1] * count, range(count), count)
    assert ((drawn >= 0) & (drawn < 1)).all()
    histogram = np.histogram(drawn, bins=20, range=(0, 1))[0]
    chi_square = ((histogram - count / 20) ** 2 / (count / 20)).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
    alone = [uniforms([key], [branch], [position], 1)[0] for key, branch, position in [(1, 0, 5), (2, 0, 5)]]
    assert uniforms([1, 2], [0, 0], [5, 5], 2).tolist() == alone
    varied = uniforms([1, 2, 1, 1], [0, 0, 1, 0], [5, 5, 5, 6], 4)
    assert len(set(varied.tolist())) == 4


def test_a_key_is_made_of_seed_and_prompt() -> None:
    keys = {draw_key(seed, prompt) for seed in (0, 1, -1, 2**63 - 1) for prompt in ((1,), (1, 2), (2, 1))}
    assert len(keys) == 12
    assert all(0 <= key < 2**64 for key in keys)


def test_the_penalty_divides_positive_logits_and_multiplies_negative_ones() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0], [2.0, -2.0, 1.0]])
    seen = torch.tensor([True, True, False])
    assert penalise(logits, [1], [seen], [2.0]).tolist() == [[2.0, -2.0, 1.0], [1.0, -4.0, 1.0]]
    assert penalise(logits, [], [], []) is logits


def test_each_row_is_cut_by_its_own_rules() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(5, 4).contiguous()
    rules = [Rules(), Rules(top_k=2), Rules(top_p=0.7), Rules(min_p=0.25), Rules(temperature=0.0, top_k=1)]
    kept = truncate(logits, rules, torch.tensor([rule.temperature for rule in rules])).isfinite().sum(-1)
    assert kept.tolist() == [4, 2, 2, 3, 4]


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.25])).expand(4, 3)
    numbers = torch.tensor([0.0, 0.49, 0.51, 0.99], dtype=torch.float64)
    tokens, log_probs = draw_anywhere(logits, torch.ones(4), numbers)
    assert tokens.tolist() == [0, 0, 1, 2]
    torch.testing.assert_close(log_probs.exp(), torch.tensor([0.5, 0.5, 0.25, 0.25], dtype=torch.float64))
    greedy, certain = draw_anywhere(logits, torch.zeros(4), numbers)
    assert (greedy.tolist(), certain.tolist()) == ([0] * 4, [0.0] * 4)


def test_what_was_cut_off_is_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]])
    for number in (0.0, 0.5, 1 - 2**-53):
        tokens, log_probs = draw_anywhere(logits, torch.ones(1), torch.tensor([number], dtype=torch.float64))
        assert (tokens.tolist(), log_probs.tolist()) == ([1], [0.0])
