"""From a policy reference to files that are verified, and to a model in memory.

Invariants:
- What is served is what the reference's digest names; the policy store verifies every file.
- The store's cache folder belongs to one process: only the policy that was loaded last stays in it, and one that is
  still needed beside it. One load at a time uses it, also when nobody waits for the one before any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from npr.types.v1 import policy_pb2
from npr_common.canary import Canary
from npr_common.dialects import Dialect, DialectError, load_dialect
from npr_common.errors import DataLossError, FailedPreconditionError, NotFoundError, NprError, UnavailableError
from npr_common.policy_store import PolicyStore
from npr_common.threads import in_own_thread
from npr_common.tokenizers import TokenizerError, load_tokenizer


@dataclass(frozen=True)
class PolicyStamp:
    """What is told of a policy with its tokens. Whoever needs no more than that does not keep a model in memory."""

    ref: policy_pb2.PolicyRef
    tokenizer: Any


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy as it is served.

    Attributes:
        model: in this process's memory; None where a server has it.
        canary: what it must say to the canary's prompt; None where it was published without.
        folder: its files.
    """

    ref: policy_pb2.PolicyRef
    model: Any
    tokenizer: Any
    dialect: Dialect
    canary: Canary | None = None
    folder: Path | None = None

    @property
    def stamp(self) -> PolicyStamp:
        """The policy without its model."""
        return PolicyStamp(self.ref, self.tokenizer)


class PolicyLoader:
    """Loads policies from the store onto one device."""

    def __init__(self, store: PolicyStore, device: str = "auto", dtype: str = "auto") -> None:
        self._store = store
        self._device = _device(device)
        self._dtype = _dtype(dtype)
        self._loading = threading.Lock()

    async def load(self, ref: policy_pb2.PolicyRef) -> LoadedPolicy:
        """Fetch, verify and load, in a thread of its own.

        Raises:
            NotFoundError: the policy is not in the store.
            DataLossError: its files are not what they were.
            FailedPreconditionError: the engine can't serve this kind of model.
        """
        return await in_own_thread(self._alone, self._load, ref)

    async def fetch(self, ref: policy_pb2.PolicyRef, keep: policy_pb2.PolicyRef | None = None) -> LoadedPolicy:
        """The same without a model; the files of the policy `keep` stay where they are too."""
        return await in_own_thread(self._alone, self._fetch, ref, keep)

    async def latest(self, line: str) -> policy_pb2.PolicyRef:
        """The newest version of a line. Raises NotFoundError when nothing was published."""
        ref = await asyncio.to_thread(self._store.latest, line)
        if ref is None:
            raise NotFoundError(f"policy line {line} has no version in {self._store.root_url}: publish one first")
        return ref

    def _alone(self, load: Callable[..., LoadedPolicy], ref: policy_pb2.PolicyRef, *others: Any) -> LoadedPolicy:
        with self._loading:
            try:
                return load(ref, *others)
            except (NprError, MemoryError, torch.OutOfMemoryError):
                raise
            except OSError as error:  # a full disk, a store that is away: it may be well again
                message = f"policy {ref.line} version {ref.version} can't be fetched: {error}"
                raise UnavailableError(message) from error
            except Exception as error:  # whatever its files make of transformers and torch
                message = f"policy {ref.line} version {ref.version} can't be loaded: {type(error).__name__}: {error}"
                raise FailedPreconditionError(message) from error

    def _load(self, ref: policy_pb2.PolicyRef) -> LoadedPolicy:
        fetched = self._fetch(ref, None)
        assert fetched.folder is not None
        return replace(fetched, model=self._model(fetched.folder, ref))

    def _fetch(self, ref: policy_pb2.PolicyRef, keep: policy_pb2.PolicyRef | None) -> LoadedPolicy:
        manifest = self._store.manifest(ref)
        folder = self._store.materialize(ref)
        self._store.evict_cached(ref, *([keep] if keep is not None else []))
        try:
            dialect = load_dialect(manifest.metadata.dialect)
            tokenizer = load_tokenizer(folder)
        except (DialectError, TokenizerError) as error:
            raise FailedPreconditionError(f"policy {ref.line} version {ref.version}: {error}") from error
        return LoadedPolicy(ref, None, tokenizer, dialect, manifest.metadata.canary, folder)

    def _model(self, folder: Path, ref: policy_pb2.PolicyRef) -> Any:
        try:
            model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=self._dtype, local_files_only=True)
        except (OSError, SafetensorError) as error:
            raise DataLossError(f"policy {ref.line} version {ref.version} can't be read: {error}") from error
        except (ValueError, KeyError) as error:
            raise FailedPreconditionError(
                f"policy {ref.line} version {ref.version} is no model that transformers can load: {error}"
            ) from error
        return model.to(self._device).eval()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _dtype(name: str) -> torch.dtype | str:
    if name == "auto":
        return name
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FailedPreconditionError(f"NPR_ROLLOUT_DTYPE is {name!r}: name a torch dtype such as bfloat16")
    return dtype
