"""The weights under training with all that belongs to them."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from npr_common.dialects import Dialect
from npr_common.errors import FailedPreconditionError
from npr_common.tags import TagIds
from npr_learner.attention.interface import TREE_ATTENTION
from npr_learner.filters import StructuralFilter
from npr_learner.forward import TokenScorer


@dataclass(frozen=True)
class Policy:
    """A model, its optimiser and its tokenizer. Weights and optimiser change in place, the rest never does.

    Attributes:
        scorer: the model, as objectives see it.
        tags: the dialect's tags in the tokenizer; None before they are single tokens.
    """

    scorer: TokenScorer
    optimizer: torch.optim.AdamW
    tokenizer: Any
    dialect: Dialect
    tags: TagIds | None

    @property
    def model(self) -> Any:
        """The model, whose weights may be split over a world."""
        return self.scorer.model

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding."""
        rows: int = self.model.get_input_embeddings().num_embeddings
        return rows

    def structural_filter(self) -> StructuralFilter:
        """The filter of stage 3.

        Raises:
            FailedPreconditionError: the tags are no single tokens.
        """
        return StructuralFilter(self.tokenizer, self.dialect, self.require_tags())

    def require_tags(self) -> TagIds:
        """The tags' ids. Raises FailedPreconditionError where there are none."""
        if self.tags is None:
            raise FailedPreconditionError(
                "the policy's tags are not single tokens: start the stage with add_tag_tokens", reason="NO_TAG_TOKENS"
            )
        return self.tags


def empty_model(config: Any, device: torch.device) -> Any:
    """A float32 model of this configuration on `device`, its weights yet to be loaded."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=TREE_ATTENTION)
    return model.to(device)


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
