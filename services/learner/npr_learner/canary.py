"""The canary of a policy that is about to be published."""

from typing import Any

import torch

from npr_common.canary import Canary, canary_prompt


@torch.no_grad()
def make_canary(model: Any) -> Canary:
    """What the model says to the canary's prompt, in float32; a model in half precision is widened for good.

    The reference is computed as exactly as the published weights allow, so that whoever compares needs to allow for
    its own rounding only.
    """
    token_ids = canary_prompt(model)
    trains = model.training
    model.eval().float()
    try:
        ids = torch.tensor([token_ids], device=model.get_input_embeddings().weight.device)
        logits_V = model(input_ids=ids, use_cache=False).logits[0, -1]
    finally:
        model.train(trains)
    return Canary.of(token_ids, logits_V.float().log_softmax(dim=-1).cpu().numpy())
