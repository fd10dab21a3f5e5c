"""The canary: one prompt, and how far an answer to it is off."""

import numpy as np
import pytest

from npr_common.canary import MAX_TOKENS, Canary, canary_token_ids

LOG_PROBS = np.log(np.asarray([0.1, 0.4, 0.05, 0.3, 0.15], np.float32))


def test_the_prompt_follows_from_the_sizes_alone() -> None:
    prompt = canary_token_ids(50_000, 4096)
    assert prompt == canary_token_ids(50_000, 4096)
    assert len(prompt) == MAX_TOKENS
    assert len(set(prompt)) > MAX_TOKENS // 2
    assert max(canary_token_ids(7, 4096)) < 7
    assert len(canary_token_ids(7, 5)) == 4


def test_it_holds_the_likeliest_tokens_and_comes_back_from_json_to_the_bit() -> None:
    canary = Canary.of((1, 2, 3), LOG_PROBS)
    assert canary.likeliest == (1, 3, 4, 0, 2)
    assert Canary.model_validate_json(canary.model_dump_json()).deviation(LOG_PROBS) == 0.0


@pytest.mark.parametrize("worst", [0.25, float("nan"), float("inf")])
def test_the_deviation_is_the_largest(worst: float) -> None:
    canary = Canary.of((1,), LOG_PROBS)
    off = LOG_PROBS.copy()
    off[0] += 0.125
    off[3] += worst
    assert canary.deviation(off) == (0.25 if worst == 0.25 else float("inf"))
    assert canary.deviation(off[:4]) == float("inf")
