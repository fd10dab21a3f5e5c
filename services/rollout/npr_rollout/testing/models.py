"""Tiny random models and a word-level tokenizer with and without tag tokens."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from npr_common.dialects import load_dialect
from npr_common.testing.tokenizers import word_tokenizer
from npr_common.tokenizers import add_tag_tokens

_WORDS = ("<|pad|>", "<|unk|>", "<|end|>", *"0123456789", "\n", " ", "<", "</", ">", ":", "\\boxed{", "}")
_TAG_WORDS = ("guideline", "plan", "step", "takeaway")


@functools.cache
def plain_tokenizer() -> Any:
    """About 50 words; tags are spelled out, as before stage 2."""
    return word_tokenizer((*_WORDS, *_TAG_WORDS, *"abcdefghijklmnopqrstuvwxyz"))


@functools.cache
def tagged_tokenizer() -> Any:
    """The same with the eight tags as single tokens, as after stage 2."""
    return add_tag_tokens(plain_tokenizer(), load_dialect("npr"))


def tiny_model(
    family: str, tokenizer: Any, seed: int = 0, *, hidden: int = 64, layers: int = 3, tied: bool = True
) -> Any:
    """A random float32 model with grouped-query attention.

    Args:
        family: `qwen3` or `llama`.
        tied: whether its head is its embeddings.
    """
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
