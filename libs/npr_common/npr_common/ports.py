"""Ports of the loopback interface."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that was free a moment ago, chosen by the kernel."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    """Whether a server could listen on the port now; connections that linger after a server's end don't count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def port_of(address: str) -> int:
    """The port of `host:port`."""
    return int(address.rpartition(":")[2])
