"""Policies as content-addressed files behind an fsspec URL.

Layout: `blobs/<sha256>` holds bytes, `lines/<line>/<version>.json` a manifest that names them. Invariants: a blob's
name is its hash; a manifest is written last and never changes; versions of a line only grow; what is read is verified
against the hash that named it. One learner writes a line; any number of engines read it.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import fsspec
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from npr.types.v1 import policy_pb2
from npr_common.canary import Canary
from npr_common.errors import AlreadyExistsError, DataLossError, InvalidArgumentError, NotFoundError
from npr_common.files import write_atomically


def _check_file_name(name: str) -> str:
    """A file lies in the policy's folder, and nowhere else."""
    if name in {"", ".", ".."} or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the plain name of a file")
    return name


FileName = Annotated[str, AfterValidator(_check_file_name)]


class PolicyMetadata(BaseModel):
    """What an engine must know of a policy besides its files.

    Attributes:
        canary: what the policy must say to one fixed prompt; None where it was published without.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dialect: str
    has_tag_tokens: bool
    stage: str
    step: int
    parent_digest: str = ""
    canary: Canary | None = None


class Manifest(BaseModel):
    """A policy: file names to hashes, and metadata."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    line: str
    version: int
    files: dict[FileName, str]
    metadata: PolicyMetadata

    def encode(self) -> bytes:
        """Canonical bytes, whose sha256 is the policy's digest."""
        return self.model_dump_json(indent=1, exclude_none=True).encode()

    def is_repeat_of(self, earlier: bytes) -> bool:
        """Whether it publishes what the canonical bytes `earlier` do.

        The canary follows from the files. It does not count: another machine computes other last digits of it, and what
        was published before there were canaries has none.
        """
        try:
            known = Manifest.model_validate_json(earlier)
        except ValidationError:
            return False
        return self._without_canary() == known._without_canary()

    def _without_canary(self) -> "Manifest":
        return self.model_copy(update={"metadata": self.metadata.model_copy(update={"canary": None})})


class PolicyStore:
    """Publishes and fetches policies; local copies live in `cache_dir`, keyed by digest."""

    def __init__(self, root_url: str, cache_dir: Path) -> None:
        self.root_url = root_url.rstrip("/")
        self._cache = cache_dir
        self._fs: Any
        self._fs, self._root = fsspec.core.url_to_fs(self.root_url)

    def publish(
        self, line: str, version: int, files: Mapping[str, bytes | Path], metadata: PolicyMetadata
    ) -> policy_pb2.PolicyRef:
        """Stores the files and then the manifest.

        A repeat with equal content answers with the same reference. Raises `AlreadyExistsError` when the version
        exists with other content or a newer one exists, `ResourceExhaustedError` when the disk is full.
        """
        for name in files:
            try:
                _check_file_name(name)
            except ValueError as error:
                raise InvalidArgumentError(f"a policy is a flat folder, but {error}") from error
        hashes = {name: self._put_blob(content) for name, content in sorted(files.items())}
        manifest = Manifest(line=line, version=version, files=hashes, metadata=metadata)
        path, content = self._manifest_path(line, version), manifest.encode()
        if self._fs.exists(path):
            content = self._fs.cat_file(path)
            if not manifest.is_repeat_of(content):
                raise AlreadyExistsError(f"policy {line} version {version} exists with other content")
        else:
            newest = self._newest_version(line)
            if newest is not None and newest > version:
                raise AlreadyExistsError(f"policy {line} is at version {newest}; {version} can't be published any more")
            self._put(path, content)
        return self._ref(line, version, content)

    def latest(self, line: str) -> policy_pb2.PolicyRef | None:
        """The newest version of a line, or None when nothing was published."""
        version = self._newest_version(line)
        return None if version is None else self.find(line, version)

    def find(self, line: str, version: int) -> policy_pb2.PolicyRef | None:
        """One version of a line, or None when it was not published."""
        try:
            return self._ref(line, version, self._fs.cat_file(self._manifest_path(line, version)))
        except FileNotFoundError:
            return None

    def manifest(self, ref: policy_pb2.PolicyRef) -> Manifest:
        """The verified manifest.

        Raises `NotFoundError`, `DataLossError` when its bytes are not the digest's, `InvalidArgumentError` when the URL
        is none that can be read.
        """
        content = self._read_manifest(ref)
        if hashlib.sha256(content).hexdigest() != ref.digest:
            raise DataLossError(f"the manifest {ref.manifest_url} is corrupt: its hash is not {ref.digest}")
        try:
            return Manifest.model_validate_json(content)
        except ValidationError as error:
            raise DataLossError(
                f"the manifest {ref.manifest_url} can't be read: {error.error_count()} errors"
            ) from error

    def _read_manifest(self, ref: policy_pb2.PolicyRef) -> bytes:
        """Whatever else the URL of a reference leads to, it is no policy."""
        try:
            fs, path = fsspec.core.url_to_fs(ref.manifest_url)
            content: bytes = fs.cat_file(path)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            message = f"policy {ref.line} version {ref.version} is not at {ref.manifest_url!r}"
            raise NotFoundError(message) from error
        except (ValueError, ImportError) as error:  # what fsspec raises on URLs that it does not know
            message = f"the manifest URL {ref.manifest_url!r} of policy {ref.line} can't be read: {error}"
            raise InvalidArgumentError(message) from error
        return content

    def materialize(self, ref: policy_pb2.PolicyRef) -> Path:
        """A local Hugging Face folder with the policy's files, every one verified by its hash.

        Raises `NotFoundError` or `DataLossError`.
        """
        folder = self._cache / ref.digest
        if folder.exists():
            return folder
        manifest = self.manifest(ref)
        self._cache.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{ref.digest[:12]}.", dir=self._cache))
        try:
            for name, digest in manifest.files.items():
                (staging / name).write_bytes(self._get_blob(digest, name))
            _rename_folder(staging, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return folder

    def evict_cached(self, *keep: policy_pb2.PolicyRef) -> None:
        """Deletes local copies other than those of `keep`; the store itself is untouched."""
        kept = {ref.digest for ref in keep}
        for folder in self._cache.glob("*"):
            if folder.is_dir() and folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def _put_blob(self, content: bytes | Path) -> str:
        data = content.read_bytes() if isinstance(content, Path) else content
        digest = hashlib.sha256(data).hexdigest()
        path = f"{self._root}/blobs/{digest}"
        if not self._fs.exists(path):
            self._put(path, data)
        return digest

    def _get_blob(self, digest: str, name: str) -> bytes:
        path = f"{self._root}/blobs/{digest}"
        if not self._fs.exists(path):
            raise DataLossError(f"{name} is missing from the policy store: no blob {digest}")
        data: bytes = self._fs.cat_file(path)
        if hashlib.sha256(data).hexdigest() != digest:
            raise DataLossError(f"{name} is corrupt in the policy store: blob {digest} has another hash")
        return data

    def _put(self, path: str, data: bytes) -> None:
        """Object stores write whole objects; a local folder needs the rename."""
        if "file" in _protocols(self._fs):
            write_atomically(Path(path), data)
        else:
            self._fs.pipe_file(path, data)

    def _newest_version(self, line: str) -> int | None:
        folder = f"{self._root}/lines/{line}"
        if not self._fs.exists(folder):
            return None
        self._fs.invalidate_cache(folder)
        names = [Path(path).name for path in self._fs.ls(folder, detail=False)]
        versions = [int(name.removesuffix(".json")) for name in names if name.endswith(".json")]
        return max(versions, default=None)

    def _manifest_path(self, line: str, version: int) -> str:
        return f"{self._root}/lines/{line}/{version:08d}.json"

    def _ref(self, line: str, version: int, manifest: bytes) -> policy_pb2.PolicyRef:
        url = self._fs.unstrip_protocol(self._manifest_path(line, version))
        digest = hashlib.sha256(manifest).hexdigest()
        return policy_pb2.PolicyRef(line=line, version=version, manifest_url=url, digest=digest)


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _rename_folder(staging: Path, folder: Path) -> None:
    """Another process may have put the same content there first; its copy is as good."""
    try:
        staging.rename(folder)
    except OSError:
        if not folder.exists():
            raise
