"""Files that are there whole or not at all."""

import errno
import os
import tempfile
from pathlib import Path

from npr_common.errors import ResourceExhaustedError


def write_atomically(path: Path, content: bytes) -> None:
    """Writes `content` to `path` durably: a crash leaves the old file or the new one, never a part.

    Raises `ResourceExhaustedError` when the disk or the quota is full; the old file is then untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        require_space(error, path)
        raise


def require_space(error: OSError, path: Path | str) -> None:
    """Raises `ResourceExhaustedError` where an error in writing `path` says that the disk or the quota is full."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        raise ResourceExhaustedError(
            f"no space left to write {path}: free some and go on with `npr run --resume`", reason="DISK_FULL"
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
