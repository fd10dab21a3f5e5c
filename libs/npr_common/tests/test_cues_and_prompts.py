"""Cues hold their tag as one token and read as the text they stand for; a prompt is encoded once and only one way."""

from typing import Any

import pytest

from npr.types.v1 import prompt_pb2
from npr_common.cues import Cue, step_cue, takeaway_cue
from npr_common.dialects import load_dialect
from npr_common.errors import InvalidArgumentError
from npr_common.prompts import encode_prompt
from npr_common.tags import Role, TagIds
from npr_common.testing.tokenizers import byte_level_tokenizer
from npr_common.tokenizers import add_tag_tokens

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


# Merges across the tags' edges, such as `\n<` and `>1`, which a cue's parts must not fall for.
CORPUS = ["\n<step>1:\n<takeaway>"] * 9


@pytest.fixture(scope="module")
def plain() -> Any:
    return byte_level_tokenizer(CORPUS, eos_token="<|end|>", chat_template=CHAT_TEMPLATE)


@pytest.mark.parametrize("name", ["npr", "multiverse"])
@pytest.mark.parametrize("number", [1, 9, 10, 123])
def test_a_cue_is_its_text_with_the_tag_as_one_token(plain: Any, name: str, number: int) -> None:
    dialect = load_dialect(name)
    tokenizer = add_tag_tokens(plain, dialect)
    tags = TagIds.from_tokenizer(tokenizer, dialect)
    assert tags is not None
    for cue, role in ((step_cue(dialect, number), Role.STEP), (takeaway_cue(dialect), Role.TAKEAWAY)):
        ids = cue.encode(tokenizer)
        assert tokenizer.decode(ids) == cue.text
        assert [token for token in ids if token in tags] == [tags.open(role)]
        assert ids == tokenizer.encode(cue.text, add_special_tokens=False)


def test_cues_are_spelled_by_the_dialect() -> None:
    npr, multiverse = load_dialect("npr"), load_dialect("multiverse")
    assert step_cue(npr, 2) == Cue(("\n", "<step>", "2:"))
    assert step_cue(npr, 2).text == "\n<step>2:"
    assert takeaway_cue(npr).text == "\n<takeaway>"
    assert takeaway_cue(multiverse).text == "\n<Conclusion>"


def conversation(*turns: tuple[str, str]) -> prompt_pb2.Prompt:
    return prompt_pb2.Prompt(messages=[prompt_pb2.ChatMessage(role=role, content=content) for role, content in turns])


def test_messages_pass_through_the_chat_template(plain: Any) -> None:
    ids = encode_prompt(plain, conversation(("system", "be brief"), ("user", "1+1?")))
    assert plain.decode(ids) == "[system]be brief[user]1+1?[a]"


def test_given_ids_stay_as_they_are(plain: Any) -> None:
    assert encode_prompt(plain, prompt_pb2.Prompt(token_ids=[5, 3, 5])) == [5, 3, 5]


@pytest.mark.parametrize("turns", [[], [("user", "x")]], ids=["neither", "both"])
def test_a_prompt_is_either_messages_or_ids(plain: Any, turns: list[tuple[str, str]]) -> None:
    prompt = conversation(*turns)
    prompt.token_ids.extend([1] * len(turns))
    with pytest.raises(InvalidArgumentError, match="exactly one"):
        encode_prompt(plain, prompt)


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    tokenizer = byte_level_tokenizer(CORPUS)
    with pytest.raises(InvalidArgumentError, match=r"chat_template\.jinja"):
        encode_prompt(tokenizer, conversation(("user", "x")))
    assert encode_prompt(tokenizer, prompt_pb2.Prompt(token_ids=[1])) == [1]
