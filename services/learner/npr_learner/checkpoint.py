"""Checkpoints of a stage behind the policy store's URL.

Layout, under `checkpoints/<run>/<stage>/`:
- `<serial>-<sha256>.json`: the frontier, named by the hash of its bytes; it names the hashes of all other files.
- `<serial>/`: weights, optimiser and RNG of that frontier, each process's part in a file of its own, as
  `torch.distributed.checkpoint` writes it. Any number of processes can read what any other number wrote.
- `base/<name>`: configuration and tokenizer files, the same for all checkpoints of the stage.
- `results/<step>.binpb`: the answers of the steps that are done and acknowledged.

Invariants: the `.json` is written last, so a checkpoint is there whole or not at all; what is read is verified by its
hash; the newest checkpoint and the one before it are kept.
"""

import hashlib
import re
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import torch
from pydantic import ValidationError
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from npr.learner.v1 import learner_pb2
from npr_common.errors import DataLossError
from npr_common.files import require_space, write_atomically
from npr_learner.records import Record, StageKey, StageRecord
from npr_learner.world import World

_FRONTIER = re.compile(r"(?P<serial>\d{8})-(?P<digest>[0-9a-f]{64})\.json")
_KEPT = 2

# One process is a world too, and what a crash left of a checkpoint is there to be written over.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
warnings.filterwarnings("ignore", message="Detected an existing checkpoint", category=UserWarning)

Tensors = dict[str, torch.Tensor]
"""By name; each may be split over the world."""


class Frontier(Record):
    """The JSON file of a checkpoint."""

    record: StageRecord
    tensors_sha256: dict[str, str]
    base_sha256: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, verified; its tensors are read into those that they are to be.

    Attributes:
        shapes: of each tensor, by name.
    """

    record: StageRecord
    base_files: Mapping[str, bytes]
    shapes: Mapping[str, torch.Size]
    url: str
    world: World

    def read_into(self, tensors: Tensors) -> None:
        """Fills the tensors, which may be split as they like, in place. Every process must call it."""
        load(
            tensors,
            storage_reader=FsspecReader(self.url),
            process_group=self.world.background,
            no_dist=self.world.size == 1,
        )


@dataclass
class Saving:
    """A checkpoint whose tensors are being written while training goes on: they were copied when it began."""

    frontier: Frontier
    base_files: Mapping[str, bytes]
    written: "Future[Any]"
    world: World

    def is_written(self) -> bool:
        """Whether `CheckpointStore.finish` has nothing to wait for, on any process. Every process must call it."""
        left = self.world.sum({"left": float(not self.written.done())}, "a look at a checkpoint")["left"]
        return not left

    def drop(self) -> None:
        """Returns once nothing is written any more; no frontier names what was."""
        self.written.exception()


class CheckpointStore:
    """Reads and writes checkpoints; one world writes a stage."""

    def __init__(self, root_url: str) -> None:
        self._fs: Any
        self._fs, root = fsspec.core.url_to_fs(root_url.rstrip("/"))
        self._root = f"{root}/checkpoints"

    def begin(self, record: StageRecord, tensors: Tensors, base_files: Mapping[str, bytes], world: World) -> Saving:
        """Begins to make a frontier durable; the tensors may change when it returns. Every process must call it."""
        base = {name: _sha256(content) for name, content in sorted(base_files.items())}
        frontier = Frontier(record=record, tensors_sha256={}, base_sha256=base)
        written = async_save(
            tensors,
            storage_writer=FsspecWriter(self._tensors_url(record), overwrite=True),
            process_group=world.background,
            no_dist=world.size == 1,
        )
        assert isinstance(written, Future)
        return Saving(frontier, base_files, written, world)

    def finish(self, saving: Saving) -> None:
        """Returns once the frontier is durable; then all but the newest two are dropped. Every process must call it.

        Raises:
            ResourceExhaustedError: the disk is full; the checkpoints before are untouched.
        """
        world, record = saving.world, saving.frontier.record
        shares = world.together(lambda: self._own_hashes(saving), "the writing of a checkpoint")
        hashes = {name: digest for share in shares for name, digest in share.items()}
        frontier = saving.frontier.model_copy(update={"tensors_sha256": hashes})
        world.on_first(lambda: self._put_frontier(record, frontier, saving.base_files), "a checkpoint")

    def newest_record(self, key: StageKey) -> StageRecord | None:
        """The newest frontier, None where the stage was never started. Raises DataLossError when it is corrupt."""
        frontier = self._newest(key)
        return None if frontier is None else frontier.record

    def load(self, key: StageKey, world: World) -> Checkpoint | None:
        """The newest checkpoint, None where the stage was never started. Every process must call it.

        Raises:
            DataLossError: a file is missing or is not what its hash says; the message names it.
        """
        frontier = self._newest(key)
        if frontier is None:
            return None
        folder, url = self._folder(key), self._tensors_url(frontier.record)
        paths = {f"{self._tensors_path(frontier.record)}/{n}": sha for n, sha in frontier.tensors_sha256.items()}
        own = [item for index, item in enumerate(sorted(paths.items())) if index % world.size == world.rank]
        world.together(lambda: self._verify(own), "the check of a checkpoint")
        base = {name: self._verified(f"{folder}/base/{name}", sha) for name, sha in frontier.base_sha256.items()}
        metadata = FsspecReader(url).read_metadata().state_dict_metadata
        shapes = {name: torch.Size(getattr(item, "size", ())) for name, item in metadata.items()}
        return Checkpoint(frontier.record, base, shapes, url, world)

    def put_result(self, key: StageKey, name: str, result: learner_pb2.StepResult) -> None:
        """Stores the answer of a step that is published and acknowledged."""
        self._put(f"{self._folder(key)}/results/{name}.binpb", result.SerializeToString(deterministic=True))

    def result(self, key: StageKey, name: str) -> learner_pb2.StepResult | None:
        """The stored answer, None where there is none yet."""
        path = f"{self._folder(key)}/results/{name}.binpb"
        if not self._fs.exists(path):
            return None
        return learner_pb2.StepResult.FromString(self._fs.cat_file(path))

    def _own_hashes(self, saving: Saving) -> dict[str, str]:
        """Of the files that this process wrote, by name; the first one wrote the metadata too."""
        folder = self._tensors_path(saving.frontier.record)
        _require_written(saving.written, folder)
        self._fs.invalidate_cache(folder)
        names = [Path(path).name for path in self._fs.ls(folder, detail=False)]
        own = [
            n for n in names if n.startswith(f"__{saving.world.rank}_") or (saving.world.is_first and n == ".metadata")
        ]
        return {name: _sha256(self._fs.cat_file(f"{folder}/{name}")) for name in own}

    def _put_frontier(self, record: StageRecord, frontier: Frontier, base_files: Mapping[str, bytes]) -> None:
        folder = self._folder(record.spec.key)
        for name, content in base_files.items():
            if not self._fs.exists(f"{folder}/base/{name}"):
                self._put(f"{folder}/base/{name}", content)
        encoded = frontier.model_dump_json(indent=1).encode()
        self._put(f"{folder}/{record.serial:08d}-{_sha256(encoded)}.json", encoded)
        self._prune(folder, record.serial)

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

    def _verify(self, paths: Iterable[tuple[str, str]]) -> None:
        for path, digest in paths:
            self._verified(path, digest)

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
                tensors = f"{folder}/{serial:08d}"
                if self._fs.exists(tensors):
                    self._fs.rm(tensors, recursive=True)

    def _folder(self, key: StageKey) -> str:
        return f"{self._root}/{key}"

    def _tensors_path(self, record: StageRecord) -> str:
        return f"{self._folder(record.spec.key)}/{record.serial:08d}"

    def _tensors_url(self, record: StageRecord) -> str:
        url: str = self._fs.unstrip_protocol(self._tensors_path(record))
        return url


def _require_written(written: "Future[Any]", path: str) -> None:
    """Waits for the tensors. Raises ResourceExhaustedError where the disk is full."""
    try:
        written.result()
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):
                require_space(failure, path)
        raise


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
