"""The policy's forward pass under the topology's mask and positions.

Invariants:
- It is the model's own code behind `transformers`, with attention of ours and explicit position ids.
- Hidden states of trained tokens alone go through the head.
- Models whose attention or head is not covered by this are refused when they are loaded, not computed wrongly.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from npr_common.errors import InvalidArgumentError
from npr_learner.batch import Batch
from npr_learner.log_probs import chosen_log_probs
from npr_learner.options import Precision

FULL_ATTENTION = "full_attention"


def check_supported(model: Any) -> None:
    """Refuse models whose log-probabilities this forward pass would get wrong.

    Raises:
        InvalidArgumentError: attention is not full everywhere, or the head is more than one matrix.
    """
    config, head = model.config, model.get_output_embeddings()
    layer_types = set(getattr(config, "layer_types", None) or [FULL_ATTENTION])
    problems = {
        "layers without full attention": layer_types != {FULL_ATTENTION},
        "dropout in its attention": bool(getattr(config, "attention_dropout", 0)),
        "a bias in its head": getattr(head, "bias", None) is not None,
        "capped logits": bool(getattr(config, "final_logit_softcapping", None)),
        "scaled logits": getattr(config, "logit_scale", None) not in (None, 1.0),
    }
    found = [name for name, present in problems.items() if present]
    if found:
        raise InvalidArgumentError(
            f"the model {config.model_type} has {', '.join(found)}; take one with full attention and a plain head",
            reason="UNSUPPORTED_MODEL",
        )


class TokenScorer(torch.nn.Module):
    """A model that tells the log-probabilities of given tokens: all that an objective needs of it."""

    def __init__(self, model: Any, precision: Precision) -> None:
        super().__init__()
        self.model = model
        self._precision = precision

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each trained token and entropy of what it was drawn from, at its row's temperature.

        Returns:
            `log_probs_N` with gradient, `entropy_N` without; float32, or float64 for a float64 model.
        """
        with _autocast(batch.token_ids_1S.device, self._precision):
            output = self.model.get_decoder()(
                input_ids=batch.token_ids_1S, position_ids=batch.positions_1S, use_cache=False, npr_attend=batch.attend
            )
        # The head is linear: dividing what goes into it by the temperature divides the logits.
        hidden_NH = output.last_hidden_state[0, batch.sources_N] / batch.temperatures_N[:, None]
        if self._precision is Precision.BFLOAT16:
            hidden_NH = hidden_NH.to(torch.bfloat16)
        return chosen_log_probs(hidden_NH, self.model.get_output_embeddings().weight, batch.targets_N)


def _autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    if precision is Precision.FLOAT32:
        return nullcontext()
    return torch.autocast(device.type, dtype=precision.torch_dtype)
