"""Tags as tokens: a copy is extended, text that spells a tag becomes the one token, and nothing is skipped."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from npr_common.dialects import load_dialect
from npr_common.tags import TagIds
from npr_common.testing.tokenizers import byte_level_tokenizer
from npr_common.tokenizers import TokenizerError, add_tag_tokens, load_tokenizer, re_encode, sub_tokens_of_tag

NPR = load_dialect("npr")
TEXT = "so <guideline><plan>1: é</plan></guideline>\n<step>1: x<|end|>"


@pytest.fixture
def tokenizer():
    return byte_level_tokenizer([*NPR.tag_texts] * 3, 290, eos_token="<|end|>")


def test_a_copy_has_the_tags_and_the_original_does_not(tokenizer):
    size = len(tokenizer)
    extended = add_tag_tokens(tokenizer, NPR)
    assert TagIds.from_tokenizer(tokenizer, NPR) is None
    assert list(TagIds.from_tokenizer(extended, NPR)) == list(range(size, size + 8))
    assert len(tokenizer) == size
    assert len(add_tag_tokens(extended, NPR)) == size + 8


def test_decoding_keeps_the_tags(tokenizer):
    extended = add_tag_tokens(tokenizer, NPR)
    ids = extended.encode(TEXT, add_special_tokens=False)
    assert extended.decode(ids, skip_special_tokens=True) == TEXT.removesuffix("<|end|>")


def test_re_encoding_turns_spelled_tags_into_tokens(tokenizer):
    extended = add_tag_tokens(tokenizer, NPR)
    spelled = tokenizer.encode(TEXT, add_special_tokens=False)
    ids = re_encode(spelled, tokenizer, extended)
    tags = TagIds.from_tokenizer(extended, NPR)
    assert extended.decode(ids, skip_special_tokens=False) == TEXT
    assert sum(token_id in tags for token_id in ids) == 5
    assert np.isin(ids, [tokenizer.eos_token_id]).sum() == 1


def test_extended_tokenizers_survive_saving(tokenizer, tmp_path):
    add_tag_tokens(tokenizer, NPR).save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert TagIds.from_tokenizer(loaded, NPR) == TagIds.from_tokenizer(add_tag_tokens(tokenizer, NPR), NPR)


def test_sub_tokens_are_the_tag_without_its_angle_brackets(tokenizer):
    brackets = {tokenizer.convert_tokens_to_ids(piece) for piece in "<>"}
    for text in NPR.tag_texts:
        sub_tokens = sub_tokens_of_tag(tokenizer, text)
        assert sub_tokens
        assert not brackets & set(sub_tokens)
        assert set(sub_tokens) == set(tokenizer.encode(text, add_special_tokens=False)) - brackets


def test_a_vocabulary_that_cannot_spell_a_tag_is_refused():
    backend = Tokenizer(models.WordLevel({"<": 0, ">": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("plan", "isolated")
    words = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    with pytest.raises(TokenizerError, match="can't spell <plan>"):
        sub_tokens_of_tag(words, "<plan>")


def test_no_tokenizer_is_a_clear_error(tmp_path):
    with pytest.raises(TokenizerError, match="No tokenizer at"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(TokenizerError, match="transformers can load"):
        load_tokenizer(tmp_path)
