"""The letter of a choice, or the choice's own text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from npr_reward.verdict import Verdict
from npr_reward.verifiers.base import TextVerifier, equality, shorten
from npr_reward.verifiers.exact import normalise

_LETTER = re.compile(r"(?:option|choice|answer)?[\s:]*[(\[]?([a-z])[)\].:]?(?:\s.*)?", re.DOTALL)


class MultipleChoiceVerifier(TextVerifier):
    """The final answer names the gold choice, by its letter or by its text."""

    name = "multiple_choice"
    description = "Compares choice letters; with metadata `choices` (a JSON list) a choice's text counts as its letter."

    def judge(self, answer: str, gold: str, metadata: Mapping[str, str]) -> Verdict:
        """Unscorable when the gold names no choice or `choices` is no JSON list of texts."""
        choices = _choices(metadata)
        if choices is None:
            return Verdict.unscorable("metadata `choices` is not a JSON list of texts")
        expected = choice_letter(gold, choices)
        if expected is None:
            return Verdict.unscorable(f"the gold {shorten(gold)} names no choice")
        return equality(choice_letter(answer, choices) == expected, answer, gold)


def choice_letter(text: str, choices: tuple[str, ...] = ()) -> str | None:
    """The lower-case letter that `text` names, by itself or as one of `choices` in full; None when it names none."""
    plain = normalise(text)
    if plain in choices:
        return chr(ord("a") + choices.index(plain))
    letter = _LETTER.fullmatch(plain)
    if letter is None or (choices and ord(letter.group(1)) - ord("a") >= len(choices)):
        return None
    return letter.group(1)


def _choices(metadata: Mapping[str, str]) -> tuple[str, ...] | None:
    """The normalised choices of the prompt: none when it lists none, None when the list can't be read."""
    if "choices" not in metadata:
        return ()
    try:
        choices = json.loads(metadata["choices"])
    except json.JSONDecodeError:
        return None
    return tuple(normalise(str(choice)) for choice in choices) if isinstance(choices, list) else None
