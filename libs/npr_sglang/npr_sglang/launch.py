"""Starts SGLang, unmodified, with the plug-in: `python -m npr_sglang [switches] [arguments of sglang.launch_server]`.

Switches, which come first:
- `--ends-with-stdin`: the server ends when its standard input does, which is when the process that holds the other end
  is gone, however that ended: a server that nobody asks would keep its memory, and a processor.
- `--without-plugin`: a plain server. Its client joins by text.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading

from npr_sglang.contract import BACKEND

ENDS_WITH_STDIN = "--ends-with-stdin"
WITHOUT_PLUGIN = "--without-plugin"

_FLAGS = ["--incremental-streaming-output"]
_PLUGIN_FLAGS = ["--radix-cache-backend", BACKEND, "--page-size", "1"]


def main() -> None:
    """Start the server; returns when it ends."""
    arguments = sys.argv[1:]
    switches = set()
    while arguments[:1] in ([ENDS_WITH_STDIN], [WITHOUT_PLUGIN]):
        switches.add(arguments.pop(0))
    if ENDS_WITH_STDIN in switches:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    # The branches of a block share one budget, so together they ask for far more than they will say. A server that
    # keeps room for all of it leaves some out of the batch; the engine has shared the pool out before it asks.
    os.environ.setdefault("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "64")
    sys.argv = ["sglang.launch_server", *_FLAGS, *_of_plugin(WITHOUT_PLUGIN not in switches), *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__")


def _of_plugin(wanted: bool) -> list[str]:
    """Its arguments; which plug-ins a server loads is said by its environment."""
    if not wanted:
        os.environ["SGLANG_PLUGINS"] = "none"
        return []
    os.environ.setdefault("SGLANG_PLUGINS", BACKEND)
    # Inputs count all branches in line; RoPE positions, which must stay within the model's context, lie lower.
    os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    return _PLUGIN_FLAGS


def _end_with_stdin() -> None:
    while os.read(0, 1 << 16):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)
