"""Decoding a tree that is known already: the engine runs as ever, but the tokens are given.

Used where the same trees must be decoded twice, in tests and benchmarks, and to have the engine's logits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from npr_common.tags import TagIds
from npr_common.topology import topology
from npr_rollout.engine.sampling import Samples
from npr_rollout.record.trajectory import Span

Place = tuple[int, int]
"""RoPE position, and branch index (-1 on the trunk): no two tokens of one trajectory share both."""


@dataclass(frozen=True)
class Script:
    """What a trajectory's spans say.

    Attributes:
        tokens: the token at each place after the prompt.
        index: where in the canonical list it stands.
    """

    tokens: Mapping[Place, int]
    index: Mapping[Place, int]

    @classmethod
    def of(cls, token_ids: Sequence[int], prompt_length: int, tags: TagIds | None) -> Script:
        """The script of a trajectory in canonical order; without `tags` it is decoded as one causal sequence."""
        if tags is None:
            places = [(position, -1) for position in range(len(token_ids))]
        else:
            tree = topology(token_ids, prompt_length, tags)
            places = [(p, b) for p, b in zip(tree.positions.tolist(), tree.branch_of.tolist(), strict=True)]
        after_prompt = range(prompt_length, len(token_ids))
        return cls({places[i]: token_ids[i] for i in after_prompt}, {places[i]: i for i in after_prompt})


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
