"""Decoding a tree that is known already: the engine runs as ever, but the tokens are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from npr_rollout.engine.sampling import Samples
from npr_rollout.record.script import Script
from npr_rollout.record.trajectory import Span


@dataclass
class ScriptedSampler:
    """Gives each request the tokens of its script.

    Attributes:
        scripts: by request id.
        logits: with `keep_logits`, what the engine had before each token: request id -> index in the canonical list ->
            float32 [V].
    """

    scripts: dict[str, Script]
    keep_logits: bool = False
    logits: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def sample(self, logits: Tensor, spans: Sequence[Span]) -> Samples:
        """The scripted tokens, with the log-probabilities that the model gives them."""
        tokens = [self._token(span) for span in spans]
        if self.keep_logits:
            self._keep(logits, spans)
        chosen = torch.tensor(tokens, device=logits.device)[:, None]
        log_probs = logits.log_softmax(dim=-1).gather(1, chosen)[:, 0]
        values: list[float] = log_probs.tolist()
        return Samples(tokens, values, values)

    def _token(self, span: Span) -> int:
        return self.scripts[span.owner.request.request_id].tokens[span.end, span.branch]

    def _keep(self, logits: Tensor, spans: Sequence[Span]) -> None:
        for row, span in enumerate(spans):
            name = span.owner.request.request_id
            kept = self.logits.setdefault(name, {})
            kept[self.scripts[name].index[span.end, span.branch]] = logits[row].clone()
