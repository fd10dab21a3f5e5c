"""The verifiers by name. To add one, see docs/add-a-verifier.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

from npr_reward.verifiers.base import TextVerifier, Verifier

__all__ = ["BUILT_IN", "TextVerifier", "Verifier", "load_verifiers"]

BUILT_IN: tuple[str, ...] = (
    "npr_reward.verifiers.exact:ExactVerifier",
    "npr_reward.verifiers.expression:ExpressionVerifier",
    "npr_reward.verifiers.integer:IntegerVerifier",
    "npr_reward.verifiers.logic_grid:LogicGridVerifier",
    "npr_reward.verifiers.math:MathVerifier",
    "npr_reward.verifiers.multiple_choice:MultipleChoiceVerifier",
    "npr_reward.verifiers.reasoning_gym:ReasoningGymVerifier",
)


def load_verifiers(paths: Sequence[str] = BUILT_IN) -> Mapping[str, Verifier]:
    """Instantiates the verifiers at `module:Class` paths, by name, sorted.

    Raises:
        ValueError: a path names no verifier, or two verifiers share a name.
    """
    verifiers: dict[str, Verifier] = {}
    for path in paths:
        verifier = _load(path)
        if verifier.name in verifiers:
            raise ValueError(f"two verifiers are named {verifier.name!r}; rename the one at {path}")
        verifiers[verifier.name] = verifier
    return dict(sorted(verifiers.items()))


def _load(path: str) -> Verifier:
    module_name, separator, class_name = path.partition(":")
    found = getattr(import_module(module_name), class_name, None) if separator else None
    if not (isinstance(found, type) and issubclass(found, Verifier)):
        raise ValueError(  # noqa: TRY004 - the path is wrong, not a type
            f"{path!r} names no verifier; write it as package.module:ClassName"
        )
    return found()
