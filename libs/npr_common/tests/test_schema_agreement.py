"""Text, tokens and streams: the parser says the same on any input, and never raises."""

from dataclasses import fields, is_dataclass
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from npr_common.dialects import load_dialect
from npr_common.schema import Span, StreamingParser, Violation, parse_text, parse_tokens
from npr_common.schema.lexer import Lexer
from npr_common.tags import Role, Tag, TagIds
from npr_common.testing.tokenizers import byte_level_tokenizer
from npr_common.tokenizers import add_tag_tokens

NPR, MULTIVERSE = load_dialect("npr"), load_dialect("multiverse")
WORDS = ["<", ">", "</", "plan", "guideline", "step", "takeaway", "1", "2", ":", "x", "\n", " ", "é", "\ufffd"]


def byte_level():
    return byte_level_tokenizer([*NPR.tag_texts, "\n<step>1: é</step>\n<step>2: €😀"] * 4)


def word_level(decoder):
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "[UNK]"])}, unk_token="[UNK]"))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def byte_fallback():
    pieces = ["▁", "▁x", "<", "plan", ">", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BYTE_FALLBACK = byte_fallback()
BASE = {
    "byte level": byte_level(),
    "words, fused": word_level(decoders.Fuse()),
    "words, joined by blanks": word_level(None),
}
TOKENIZERS = BASE | {f"{name}, with tags": add_tag_tokens(tokenizer, NPR) for name, tokenizer in BASE.items()}
BYTE_LEVEL = [name for name in TOKENIZERS if name.startswith("byte level")]

pieces = st.one_of(
    st.sampled_from(
        [*NPR.tag_texts] * 2 + ["<", "</", "pl", "an>", "<plan", "step>", "1:", "2: a", " ", "\n", "x", "€"]
    ),
    st.text(max_size=3),
)
soups = st.lists(pieces, max_size=30).map("".join)
some_tokenizer = st.sampled_from(sorted(TOKENIZERS))


def flatten(lists):
    return list(chain.from_iterable(lists))


def id_lists(tokenizer):
    """Ids biased towards tags, whole and spelled, in between any ids of the vocabulary and some beyond it."""
    tags = [tokenizer.encode(text, add_special_tokens=False) for text in NPR.tag_texts]
    spelled = [TOKENIZERS["byte level"].encode(text) for text in NPR.tag_texts] if len(tokenizer) > 200 else []
    single = st.integers(0, len(tokenizer) + 2).map(lambda token_id: [token_id])
    return st.lists(st.one_of(st.sampled_from(tags + spelled), single), max_size=40).map(flatten)


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def owners(tokenizer, ids):
    """For each character of the decoded list, the token with which it became final: by decoding every prefix."""
    owner: list[int] = []
    for index in range(len(ids)):
        text = decode(tokenizer, ids[: index + 1])
        pending = min(len(text) - len(text.rstrip("\ufffd")), 3)
        owner += [index] * (len(text) - pending - len(owner))
    return owner + [len(ids) - 1] * (len(decode(tokenizer, ids)) - len(owner))


def in_tokens(node, owner, count, offset):
    """A tree or a violation with its characters turned into tokens."""
    if isinstance(node, Span):
        if node.start >= len(owner):
            return Span(offset + count, offset + count)
        end = owner[node.end - 1] + 1 if node.end else 0
        return Span(offset + (owner[node.start] if node.start < node.end else end), offset + end)
    if isinstance(node, Violation):
        at = owner[node.position] if node.position < len(owner) else count
        return Violation(node.code, offset + at, node.message)
    if isinstance(node, tuple):
        return tuple(in_tokens(part, owner, count, offset) for part in node)
    if is_dataclass(node):
        values = {f.name: in_tokens(getattr(node, f.name), owner, count, offset) for f in fields(node)}
        return type(node)(**values)
    return node


def assert_agreement(tokenizer, ids, prompt):
    by_text = parse_text(decode(tokenizer, ids), NPR)
    by_token = parse_tokens([*prompt, *ids], tokenizer, NPR, len(prompt))
    owner = owners(tokenizer, ids)
    assert by_token.tree == in_tokens(by_text.tree, owner, len(ids), len(prompt))
    assert by_token.violations == in_tokens(by_text.violations, owner, len(ids), len(prompt))


@settings(max_examples=250, deadline=None)
@given(some_tokenizer, st.data())
def test_tokens_agree_with_their_text(name, data):
    tokenizer = TOKENIZERS[name]
    ids, prompt = data.draw(id_lists(tokenizer)), data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=4))
    assert_agreement(tokenizer, ids, prompt)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(BYTE_LEVEL), soups)
def test_encoded_text_agrees_with_the_text(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert decode(tokenizer, ids) == text
    assert_agreement(tokenizer, ids, [])


@settings(max_examples=200, deadline=None)
@given(soups, st.data())
def test_chunks_agree_with_the_whole(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parser = StreamingParser(NPR)
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parser.feed_text(text[start:end])
    assert parser.finish() == parse_text(text, NPR)


@settings(max_examples=100, deadline=None)
@given(soups)
def test_a_character_at_a_time_agrees_and_gives_each_tag_at_once(text):
    lexer = Lexer(NPR)
    given_out = []
    for index, character in enumerate(text):
        lexemes = list(lexer.feed(character))
        assert all(lexeme.end == index + 1 for lexeme in lexemes if lexeme.tag)
        given_out += lexemes
    given_out += lexer.finish()
    assert "".join(lexeme.text for lexeme in given_out) == text
    tags = [(lexeme.start, lexeme.tag) for lexeme in Lexer(NPR).feed(text) if lexeme.tag]
    assert [(lexeme.start, lexeme.tag) for lexeme in given_out if lexeme.tag] == tags


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.sampled_from([*MULTIVERSE.tag_texts]), pieces), max_size=30).map("".join), st.data())
def test_multiverse_soup_agrees_in_chunks(text, data):
    cut = data.draw(st.integers(0, len(text)))
    parser = StreamingParser(MULTIVERSE)
    parser.feed_text(text[:cut])
    parser.feed_text(text[cut:])
    assert parser.finish() == parse_text(text, MULTIVERSE)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-3, 300), max_size=40))
def test_no_ids_raise_even_where_bytes_decode_backwards(ids):
    assert parse_tokens(ids, BYTE_FALLBACK, NPR).tree.span.end <= len(ids)


@pytest.mark.parametrize("name", ["byte level", "words, fused"])
def test_spelled_tags_are_listed_only_where_the_vocabulary_has_the_tag(name):
    before, after = TOKENIZERS[name], TOKENIZERS[f"{name}, with tags"]
    spelled = [before.convert_tokens_to_ids(piece) for piece in ("<", "plan", ">")]
    tag, tags = Tag(Role.STEP), TagIds.from_tokenizer(after, NPR)
    assert TagIds.from_tokenizer(before, NPR) is None
    assert not parse_tokens(spelled, before, NPR).spelled_tags
    result = parse_tokens([9, tags.id_of[tag], *spelled], after, NPR, 1)
    assert [(s.tag, s.position) for s in result.spelled_tags] == [(Tag(Role.PLAN), 2)]
    assert result == parse_tokens([9, tags.id_of[tag], *spelled], after, NPR, 1, tags=tags)


def test_garbage_bytes_take_linear_time():
    tokenizer = TOKENIZERS["byte level"]
    bad = tokenizer.convert_tokens_to_ids("ÿ")  # the byte 0xFF, which no text holds
    result = parse_tokens([bad] * 20_000, tokenizer, NPR)
    assert result.tree.final_prose == "\ufffd" * 20_000
