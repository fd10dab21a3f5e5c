"""For tests and benchmarks: small Qwen3 models, a word-level tokenizer with tag tokens, and random trajectories."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from npr.types.v1 import policy_pb2, sampling_pb2, trajectory_pb2
from npr_common.dialects import load_dialect
from npr_common.tags import TagIds
from npr_common.testing import tokenizers
from npr_common.tokenizers import add_tag_tokens
from npr_learner.attention.interface import TREE_ATTENTION

WORDS = ("<|pad|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|end|>", *"0123456789", "\n", " ", "\\boxed", "</", "<")
WORDS += (*">{}:=+", "guideline", "plan", "step", "takeaway", "alpha", "beta", "gamma")
DIALECT = load_dialect("npr")


def word_tokenizer() -> Any:
    """A lossless tokenizer of `WORDS`, without tag tokens, with a chat template."""
    turns = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    answer = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    return tokenizers.word_tokenizer(WORDS, chat_template=turns + answer)


def qwen3(vocabulary_size: int, seed: int = 0, *, tied: bool = True, layers: int = 2) -> Qwen3ForCausalLM:
    """A freshly initialised model."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=4,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM._from_config(config, attn_implementation=TREE_ATTENTION)


@dataclass
class World:
    """A tokenizer with tags, and trajectories drawn from it."""

    tokenizer: Any
    tags: TagIds
    policy: policy_pb2.PolicyRef

    def encode(self, text: str) -> list[int]:
        """Ids of a text, tags as single tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def parallel(
        self, generator: np.random.Generator, group: str, index: int, branches: int = 0
    ) -> trajectory_pb2.Trajectory:
        """A well-formed trajectory of one block with forced headers and cue, and made-up behaviour log-probs."""
        branches = branches or int(generator.integers(1, 4))
        pieces: list[tuple[str, bool]] = [("<guideline>", False)]
        pieces += [(f"<plan>{i}: alpha{generator.integers(10)}</plan>", False) for i in range(1, branches + 1)]
        pieces += [("</guideline>", False)]
        for i in range(1, branches + 1):
            body = " ".join(generator.choice(["alpha", "beta", "gamma", "7"], int(generator.integers(1, 8))))
            pieces += [(f"\n<step>{i}:", True), (f" {body}</step>", False)]
        pieces += [("\n<takeaway>", True), (f"gamma={generator.integers(10)}</takeaway>", False)]
        pieces += [(f"\n\\boxed{{{generator.integers(10)}}}<|end|>", False)]
        return self.trajectory(generator, group, index, pieces, visibility=sampling_pb2.VISIBILITY_PARALLEL)

    def sequential(self, generator: np.random.Generator, group: str, index: int) -> trajectory_pb2.Trajectory:
        """A tag-free trajectory."""
        words = " ".join(generator.choice(["alpha", "beta", "gamma", "7"], int(generator.integers(1, 12))))
        pieces = [(f"{words} \\boxed{{3}}<|end|>", False)]
        return self.trajectory(generator, group, index, pieces, visibility=sampling_pb2.VISIBILITY_SEQUENTIAL)

    def trajectory(
        self,
        generator: np.random.Generator,
        group: str,
        index: int,
        pieces: list[tuple[str, bool]],
        *,
        visibility: "sampling_pb2.Visibility.ValueType",
        prompt: str = "<|user|>alpha+beta<|assistant|>",
    ) -> trajectory_pb2.Trajectory:
        """A completed trajectory of pieces of text, each forced or sampled."""
        prompt_ids = self.encode(prompt)
        ids: list[int] = []
        forced: list[bool] = []
        for text, is_forced in pieces:
            piece = self.encode(text)
            ids += piece
            forced += [is_forced] * len(piece)
        log_probs = [0.0 if is_forced else -float(generator.uniform(0.1, 3)) for is_forced in forced]
        return trajectory_pb2.Trajectory(
            trajectory_id=f"{group}/{index}",
            group_id=group,
            sample_index=index,
            token_ids=prompt_ids + ids,
            prompt_length=len(prompt_ids),
            behavior_log_probs=log_probs,
            forced=forced,
            policy=self.policy,
            visibility=visibility,
            outcome=trajectory_pb2.OUTCOME_COMPLETED,
            response_text="".join(text for text, _ in pieces).removesuffix("<|end|>"),
        )


def make_world(policy: policy_pb2.PolicyRef | None = None) -> World:
    """A world whose trajectories are of this policy."""
    tokenizer = add_tag_tokens(word_tokenizer(), DIALECT)
    tags = TagIds.from_tokenizer(tokenizer, DIALECT)
    if tags is None:
        raise AssertionError("add_tag_tokens made them single tokens")
    return World(tokenizer, tags, policy or policy_pb2.PolicyRef(line="run", version=3, digest="d"))
