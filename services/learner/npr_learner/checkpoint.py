"""Checkpoints of a stage behind the policy store's URL.

Layout, under `checkpoints/<run>/<stage>/`:
- `<serial>-<sha256>.json`: the frontier, named by the hash of its bytes; it names the tensors' and base files' hashes.
- `<serial>.safetensors`: weights, optimiser and RNG of that frontier.
- `base/<name>`: configuration and tokenizer files, the same for all checkpoints of the stage.
- `results/<step>.binpb`: the answers of the steps that are done and acknowledged.

Invariants: the `.json` is written last, so a checkpoint is there whole or not at all; what is read is verified by its
hash; the newest checkpoint and the one before it are kept.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import safetensors.torch
import torch
from pydantic import ValidationError

from npr.learner.v1 import learner_pb2
from npr_common.errors import DataLossError
from npr_common.files import write_atomically
from npr_learner.records import Record, StageKey, StageRecord

_FRONTIER = re.compile(r"(?P<serial>\d{8})-(?P<digest>[0-9a-f]{64})\.json")
_KEPT = 2


class Frontier(Record):
    """The JSON file of a checkpoint."""

    record: StageRecord
    tensors_sha256: str
    base_sha256: dict[str, str]


class Checkpoint(NamedTuple):
    """A checkpoint, read and verified."""

    record: StageRecord
    tensors: dict[str, torch.Tensor]
    base_files: dict[str, bytes]


class CheckpointStore:
    """Reads and writes checkpoints; one learner writes a stage."""

    def __init__(self, root_url: str) -> None:
        self._fs: Any
        self._fs, root = fsspec.core.url_to_fs(root_url.rstrip("/"))
        self._root = f"{root}/checkpoints"

    def save(self, record: StageRecord, tensors: Mapping[str, torch.Tensor], base_files: Mapping[str, bytes]) -> None:
        """Makes a frontier durable, then drops all but the newest two.

        Raises:
            ResourceExhaustedError: the disk is full; the checkpoints before are untouched.
        """
        folder = self._folder(record.spec.key)
        digest = self._put_tensors(f"{folder}/{record.serial:08d}.safetensors", tensors)
        for name, content in base_files.items():
            if not self._fs.exists(f"{folder}/base/{name}"):
                self._put(f"{folder}/base/{name}", content)
        base = {name: _sha256(content) for name, content in sorted(base_files.items())}
        frontier = Frontier(record=record, tensors_sha256=digest, base_sha256=base).model_dump_json(indent=1).encode()
        self._put(f"{folder}/{record.serial:08d}-{_sha256(frontier)}.json", frontier)
        self._prune(folder, record.serial)

    def newest_record(self, key: StageKey) -> StageRecord | None:
        """The newest frontier, None where the stage was never started. Raises DataLossError when it is corrupt."""
        frontier = self._newest(key)
        return None if frontier is None else frontier.record

    def load(self, key: StageKey) -> Checkpoint | None:
        """The newest checkpoint, None where the stage was never started.

        Raises:
            DataLossError: a file is missing or is not what its hash says; the message names it.
        """
        frontier = self._newest(key)
        if frontier is None:
            return None
        folder, serial = self._folder(key), frontier.record.serial
        tensors = self._verified(f"{folder}/{serial:08d}.safetensors", frontier.tensors_sha256)
        base = {name: self._verified(f"{folder}/base/{name}", sha) for name, sha in frontier.base_sha256.items()}
        return Checkpoint(frontier.record, safetensors.torch.load(tensors), base)

    def put_result(self, key: StageKey, name: str, result: learner_pb2.StepResult) -> None:
        """Stores the answer of a step that is published and acknowledged."""
        self._put(f"{self._folder(key)}/results/{name}.binpb", result.SerializeToString(deterministic=True))

    def result(self, key: StageKey, name: str) -> learner_pb2.StepResult | None:
        """The stored answer, None where there is none yet."""
        path = f"{self._folder(key)}/results/{name}.binpb"
        if not self._fs.exists(path):
            return None
        return learner_pb2.StepResult.FromString(self._fs.cat_file(path))

    def _newest(self, key: StageKey) -> Frontier | None:
        found = self._frontiers(self._folder(key))
        if not found:
            return None
        serial = max(found)
        path = found[serial]
        content = self._verified(path, str(_FRONTIER.fullmatch(Path(path).name)["digest"]))  # type: ignore[index]
        try:
            return Frontier.model_validate_json(content)
        except ValidationError as error:
            raise DataLossError(
                f"the checkpoint {path} was written by another version of the learner: use that one, or a new run",
                reason="CHECKPOINT_UNREADABLE",
            ) from error

    def _frontiers(self, folder: str) -> dict[int, str]:
        """Path of the frontier file by serial."""
        if not self._fs.exists(folder):
            return {}
        self._fs.invalidate_cache(folder)
        paths = [str(path) for path in self._fs.ls(folder, detail=False)]
        matches = [(path, _FRONTIER.fullmatch(Path(path).name)) for path in paths]
        return {int(match["serial"]): path for path, match in matches if match}

    def _verified(self, path: str, digest: str) -> bytes:
        content: bytes | None = self._fs.cat_file(path) if self._fs.exists(path) else None
        if content is None or _sha256(content) != digest:
            state = "missing" if content is None else "corrupt: its hash is not the recorded one"
            raise DataLossError(
                f"the checkpoint file {path} is {state}. Restore it from a backup, or delete the newest "
                "`<serial>-*.json` beside it to go on from the checkpoint before",
                reason="CHECKPOINT_CORRUPT",
                metadata={"path": path},
            )
        return content

    def _put_tensors(self, path: str, tensors: Mapping[str, torch.Tensor]) -> str:
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        content = safetensors.torch.save(on_host)
        self._put(path, content)
        return _sha256(content)

    def _put(self, path: str, content: bytes) -> None:
        protocols = (self._fs.protocol,) if isinstance(self._fs.protocol, str) else self._fs.protocol
        if "file" in protocols:
            write_atomically(Path(path), content)
        else:  # object stores write whole objects
            self._fs.pipe_file(path, content)

    def _prune(self, folder: str, newest: int) -> None:
        found = self._frontiers(folder)
        for serial in sorted(found)[:-_KEPT]:
            if serial < newest:
                self._fs.rm_file(found[serial])
                tensors = f"{folder}/{serial:08d}.safetensors"
                if self._fs.exists(tensors):
                    self._fs.rm_file(tensors)

    def _folder(self, key: StageKey) -> str:
        return f"{self._root}/{key}"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
