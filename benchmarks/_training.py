"""What the learner's benchmarks share: freshly initialised models, and the check that rivals compute one gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from npr_learner.attention.interface import TREE_ATTENTION


@dataclass(frozen=True)
class Shape:
    """A model to time: Qwen3 with a tied head; two query heads share a key head."""

    name: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int = 4
    head_size: int = 32

    def model(self) -> Qwen3ForCausalLM:
        """A freshly initialised one."""
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            head_dim=self.head_size,
            tie_word_embeddings=True,
            initializer_range=0.06,
        )
        return Qwen3ForCausalLM._from_config(config, attn_implementation=TREE_ATTENTION)


def gradient_of(model: Qwen3ForCausalLM) -> torch.Tensor:
    """The gradient that a model holds, flat."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def require_equal(name: str, gradient: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises AssertionError unless two gradients differ by rounding only."""
    difference = (gradient - expected).norm() / expected.norm()
    if difference > 1e-4:
        raise AssertionError(f"{name} computes another gradient: {difference:.1e} apart")
