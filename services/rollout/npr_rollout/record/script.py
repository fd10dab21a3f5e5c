"""A tree that is known already, as what each of a trajectory's spans is to say.

Used where the same trees must be decoded twice, in tests and benchmarks, and to have an engine's logits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from npr_common.tags import TagIds
from npr_common.topology import topology
from npr_rollout.record.trajectory import Span

Place = tuple[int, int]
"""RoPE position, and branch index (-1 on the trunk): no two tokens of one trajectory share both."""


@dataclass(frozen=True)
class Script:
    """What a trajectory's spans say.

    Attributes:
        tokens: the token at each place after the prompt; a place that is missing is drawn, where an engine allows that.
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

    def says(self, span: Span, most: int, free: int) -> tuple[int, ...]:
        """What a span says next, `most` tokens of it at the most; `free` where that is drawn."""
        ends = [position for position, branch in self.tokens if branch == span.branch]
        count = min(most, max(ends, default=-1) + 1 - span.end)
        return tuple(self.tokens.get((span.end + i, span.branch), free) for i in range(count))
