"""Tokenizers that are made in no time, for tests and benchmarks; neither has tag tokens until they are added."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, END = "<|pad|>", "<|unk|>", "<|end|>"


def word_tokenizer(words: Sequence[str], **options: Any) -> Any:
    """A tokenizer whose ids are the places of these words; lossless on text that they spell.

    Words of several symbols are looked for first; then a run of letters is one word, and all else is one by one.

    Args:
        words: `<|name|>` are special tokens; `PAD`, `UNKNOWN` and `END` must be among them.
        options: more of what `PreTrainedTokenizerFast` takes, such as a chat template.
    """
    special = [word for word in words if word.startswith("<|")]
    symbols = [word for word in words if len(word) > 1 and not word.isalpha() and word not in special]
    pattern = "|".join([*map(re.escape, sorted(symbols, key=len, reverse=True)), "[a-zA-Z]+", r"[\s\S]"])
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        **options,
    )


def byte_level_tokenizer(corpus: Iterable[str], vocabulary_size: int = 300, **options: Any) -> Any:
    """A byte-level BPE tokenizer, lossless on any text, with the merges that this corpus gives."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary_size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
