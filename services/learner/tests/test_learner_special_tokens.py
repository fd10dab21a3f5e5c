"""New rows for the tags, and nothing else changed."""

import pytest
import torch

from npr_common.tags import Role, TagIds
from npr_learner.special_tokens import add_tags
from npr_learner.testing import DIALECT, WORDS, qwen3, word_tokenizer


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("spare_rows", [0, 20])
def test_tag_rows_are_means_of_their_sub_tokens(tied: bool, spare_rows: int) -> None:
    tokenizer, model = word_tokenizer(), qwen3(len(WORDS) + spare_rows, tied=tied)
    before = [m.weight.detach().clone() for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    extended = add_tags(model, tokenizer, DIALECT)
    tags = TagIds.from_tokenizer(extended, DIALECT)
    assert tags is not None
    assert TagIds.from_tokenizer(tokenizer, DIALECT) is None
    assert model.config.vocab_size == max(len(extended), len(WORDS) + spare_rows)
    for matrix, old in zip((model.get_input_embeddings(), model.get_output_embeddings()), before, strict=True):
        torch.testing.assert_close(matrix.weight[: len(WORDS)], old[: len(WORDS)], rtol=0, atol=0)
        torch.testing.assert_close(matrix.weight[tags.open(Role.PLAN)], old[WORDS.index("plan")])
        # `</` is one token here: it holds a slash, so it counts.
        closing = (old[WORDS.index("plan")] + old[WORDS.index("</")]) / 2
        torch.testing.assert_close(matrix.weight[tags.close(Role.PLAN)], closing)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied
    assert add_tags(model, extended, DIALECT) is extended
