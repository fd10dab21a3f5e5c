"""Log files of the stack's processes."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROTATE_BYTES = 16 * 1024 * 1024
TAIL_BYTES = 4096


def rotate(path: Path) -> None:
    """Puts a large log aside as `<name>.1`, before a start. One old file is kept."""
    if path.exists() and path.stat().st_size > ROTATE_BYTES:
        path.replace(path.with_name(f"{path.name}.1"))


def size(path: Path) -> int:
    """Bytes of the log; 0 when there is none."""
    return path.stat().st_size if path.exists() else 0


def wrong_settings(path: Path, begin: int) -> list[str]:
    """The lines that name a wrong variable, from a byte on: what a process whose settings are wrong says of them."""
    with path.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    return [line for line in lines if re.match(r"NPR_\w+: ", line)]


def last_line(path: Path) -> str:
    """The last line that is not empty, else the file's own path: never nothing to go by."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    return next((line.strip() for line in reversed(lines) if line.strip()), f"see {path}")
