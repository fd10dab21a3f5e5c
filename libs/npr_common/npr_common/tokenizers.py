"""Tokenizers before and after stage 2, which makes each tag one token.

Invariants:
- A tokenizer is never changed in place: adding tags gives a copy.
- Added tags are ordinary added tokens, not "special" ones: decoding that skips special tokens keeps them, and plain
  text that spells a tag is encoded as its one token.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer

from npr_common.dialects import Dialect
from npr_common.tags import TagIds


class TokenizerError(ValueError):
    """A tokenizer can't be loaded or used; the message says what to do."""


def load_tokenizer(path: str | Path) -> Any:
    """Load the `transformers` tokenizer in a local folder, or the one inside a `.gguf` file.

    Raises:
        TokenizerError: there is none.
    """
    location = Path(path)
    if not location.exists():
        raise TokenizerError(f"No tokenizer at {location}: give the folder of a model, or a .gguf file.")
    folder, options = (location.parent, {"gguf_file": location.name}) if location.is_file() else (location, {})
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise TokenizerError(f"{location} holds no tokenizer that transformers can load: {error}") from error


def eos_ids(tokenizer: Any, generation_config: Any = None) -> frozenset[int]:
    """All ids that end a text: the tokenizer's, and those of a model's generation settings, where it has any."""
    configured = getattr(generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in [*ids, tokenizer.eos_token_id] if token is not None)


def add_tag_tokens(tokenizer: Any, dialect: Dialect) -> Any:
    """A copy of the tokenizer in which every tag of the dialect is one token.

    New ids follow the old ones in the order of `Dialect.tags`; tags that are one token already keep their id.

    Raises:
        TokenizerError: the tokenizer does not take them.
    """
    extended = copy.deepcopy(tokenizer)
    extended.add_tokens([AddedToken(text, normalized=False, special=False) for text in dialect.tag_texts])
    if TagIds.from_tokenizer(extended, dialect) is None:
        raise TokenizerError(f"The tokenizer does not take the tags of {dialect.name!r} as single tokens.")
    return extended


def sub_tokens_of_tag(tokenizer: Any, tag_text: str) -> list[int]:
    """The tokens that spell a tag, less those that hold nothing but `<` and `>`.

    Their embedding rows' mean is the tag's first row when it becomes a token.

    Args:
        tokenizer: the one *before* the tags were added.
        tag_text: the tag as spelled, such as `</plan>`.

    Raises:
        TokenizerError: nothing of the tag's name can be spelled in this vocabulary.
    """
    ids: list[int] = tokenizer.encode(tag_text, add_special_tokens=False)
    kept = [i for i in ids if i != tokenizer.unk_token_id and tokenizer.decode([i]).strip().strip("<>")]
    if not kept:
        raise TokenizerError(f"The vocabulary can't spell {tag_text}; add tokens for the tag's name before training.")
    return kept


def re_encode(ids: Sequence[int], before: Any, after: Any) -> list[int]:
    """Ids of the tokenizer `before` as ids of `after`, by way of their text: spelled-out tags become single tokens."""
    text = before.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    encoded: list[int] = after.encode(text, add_special_tokens=False)
    return encoded
