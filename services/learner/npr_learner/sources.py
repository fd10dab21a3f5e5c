"""Where a stage's weights come from: a folder, a `.gguf` file, an fsspec URL, a package, a bundled model, a policy.

Invariant: whatever the source, the result is a float32 model with SDPA attention and its own tokenizer.
"""

import copy
import hashlib
import shutil
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import torch
from transformers import AutoModelForCausalLM

from npr.learner.v1 import learner_pb2
from npr_common.errors import InvalidArgumentError, NotFoundError
from npr_common.policy_store import PolicyStore
from npr_common.references import BUNDLED_PREFIX, resolve_reference
from npr_common.tokenizers import TokenizerError, load_tokenizer
from npr_learner.attention.interface import TREE_ATTENTION
from npr_learner.forward import check_supported
from npr_learner.policy import empty_model

_BUNDLED_PACKAGE = "npr_learner.seed"


class Loaded(NamedTuple):
    """A model and its tokenizer."""

    model: Any
    tokenizer: Any


def locate(source: learner_pb2.ModelSource, store: PolicyStore, cache_dir: Path) -> Path:
    """A local folder or `.gguf` file with the source's weights.

    Raises:
        InvalidArgumentError: the source is empty.
        NotFoundError: nothing is there.
        DataLossError: a published policy is corrupt.
    """
    if source.WhichOneof("source") == "policy":
        return store.materialize(source.policy)
    if not source.model:
        raise InvalidArgumentError("a stage needs a source: name a model or a policy")
    if source.model.startswith(BUNDLED_PREFIX):
        return _bundled(source.model.removeprefix(BUNDLED_PREFIX))
    location = resolve_reference(source.model)
    return _fetched(location, cache_dir / "models") if "://" in location else Path(location)


def load_model(path: Path) -> Loaded:
    """The model, in the host's memory, and the tokenizer in a folder or `.gguf` file.

    Raises:
        NotFoundError: there is no model that `transformers` can load.
        InvalidArgumentError: it is one that the learner can't train.
    """
    folder, options = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    try:
        tokenizer = load_tokenizer(path)
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation=TREE_ATTENTION, local_files_only=True, **options
        )
    except (OSError, ValueError, KeyError, TokenizerError) as error:
        raise NotFoundError(
            f"{path} holds no model that can be loaded: name a Hugging Face folder or a .gguf file ({error})",
            reason="MODEL_NOT_LOADED",
        ) from error
    check_supported(model)
    return Loaded(_dequantized(model) if options else model, tokenizer)


def _dequantized(quantized: Any) -> Any:
    """The same weights in a model that doesn't remember that they were quantized, and so can be trained and saved."""
    config = copy.deepcopy(quantized.config)
    del config.quantization_config
    model = empty_model(config, torch.device("cpu"))
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    return model


def _bundled(name: str) -> Path:
    models = {
        path.parent.name: path.parent for path in Path(str(resources.files(_BUNDLED_PACKAGE))).glob("*/config.json")
    }
    if name not in models:
        there = ", ".join(f"`{BUNDLED_PREFIX}{known}`" for known in sorted(models))
        raise NotFoundError(f"no bundled model {name!r}: there are {there}", reason="MODEL_NOT_FOUND")
    return models[name]


def _fetched(url: str, cache: Path) -> Path:
    """A local copy of a remote folder or `.gguf` file, fetched once."""
    target = cache / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rstrip("/").rpartition("/")[2]
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        fs, path = fsspec.core.url_to_fs(url)
        if not fs.exists(path):
            raise NotFoundError(f"no model at {url}: correct the source", reason="MODEL_NOT_FOUND")
        fs.get(path.rstrip("/"), str(staging / target.name), recursive=True)
        (staging / target.name).rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target
