"""The scorers that reasoning-gym ships with its procedural families (an optional extra).

The prompt's metadata names the `family`, and `entry` holds the task's own JSON entry, which scorers with several right
answers need; without it, the gold alone is the entry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from npr_reward.verdict import Verdict
from npr_reward.verifiers.base import Verifier, shorten


class ReasoningGymVerifier(Verifier):
    """The family's own scorer gives the answer full marks."""

    name = "reasoning_gym"
    description = "Asks the scorer of the reasoning-gym family in metadata `family`; only full marks are correct."
    max_answer_chars = 20_000

    def judge(self, answer: str, gold: str, metadata: Mapping[str, str]) -> Verdict:
        """Unscorable without reasoning-gym, without a known family or with an unreadable entry."""
        try:
            from reasoning_gym import get_score_answer_fn  # noqa: PLC0415  (an optional extra)
        except ModuleNotFoundError:
            return Verdict.unscorable("reasoning-gym is missing; install npr-reward[reasoning-gym]")
        family = metadata.get("family", "")
        try:
            score_answer = get_score_answer_fn(family)
            entry = json.loads(metadata.get("entry", "{}"))
        except (ValueError, KeyError) as error:
            return Verdict.unscorable(f"family {family!r} can't be scored: {error}")
        score = float(score_answer(answer, {"answer": gold, "metadata": {}, **entry}))
        reason = f"{family} gives {shorten(answer)} {score:.2f} of 1"
        return Verdict.correct(reason) if score >= 1 else Verdict.incorrect(reason)
