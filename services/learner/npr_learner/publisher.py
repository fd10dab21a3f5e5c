"""A policy as the files of a Hugging Face folder.

Invariant: equal weights give equal bytes, so publishing a version again changes nothing.
"""

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from npr_common.canary import Canary
from npr_learner.canary import make_canary
from npr_learner.options import Precision


def base_files(model: Any, tokenizer: Any) -> dict[str, bytes]:
    """All files but the weights: configuration, generation settings, tokenizer and chat template."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save_pretrained(folder)
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        return _read(folder)


def policy_files(model: Any, base: Mapping[str, bytes], precision: Precision) -> tuple[dict[str, bytes], Canary]:
    """The base files and the weights, rounded to `precision`, and what these weights must say to the canary."""
    rounded = _rounded(model, precision)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rounded.save_pretrained(folder, max_shard_size="4GB")
        return {**base, **_read(folder)}, make_canary(rounded)


def _rounded(model: Any, precision: Precision) -> Any:
    if precision.torch_dtype == torch.float32:
        return model
    return copy.deepcopy(model).to(precision.torch_dtype)


def _read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
