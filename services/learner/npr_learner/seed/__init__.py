"""The tiny seed model: shipped as package data, with the program that makes it (`python -m npr_learner.seed`)."""

from __future__ import annotations

from pathlib import Path


def shipped_seed() -> Path:
    """Folder of the shipped seed model: a `transformers` checkpoint with its tokenizer and chat template."""
    return Path(__file__).parent / "tiny"
