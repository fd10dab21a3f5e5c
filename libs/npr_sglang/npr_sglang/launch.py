"""Starts SGLang, unmodified, with the plug-in: `python -m npr_sglang [switches] [arguments of sglang.launch_server]`.

Switches, which come first:
- `--check`: start nothing; look whether a server could be started so, and say in the last line why not (exit code 1).
- `--ends-with-stdin`: the server ends when its standard input does, which is when the process that holds the other end
  is gone, however that ended: a server that nobody asks would keep its memory, and a processor.
- `--without-plugin`: a plain server. Its client joins by text.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
import threading
import warnings

from npr_sglang.check import check_start
from npr_sglang.contract import BACKEND
from npr_sglang.errors import PluginError

CHECK = "--check"
ENDS_WITH_STDIN = "--ends-with-stdin"
WITHOUT_PLUGIN = "--without-plugin"

_SWITCHES = (CHECK, ENDS_WITH_STDIN, WITHOUT_PLUGIN)
_FLAGS = ["--incremental-streaming-output"]
_PLUGIN_FLAGS = ["--radix-cache-backend", BACKEND, "--page-size", "1"]


def main() -> int:
    """Start the server, and return when it ends; or look whether that could be done. The exit code."""
    arguments = sys.argv[1:]
    switches = set()
    while arguments and arguments[0] in _SWITCHES:
        switches.add(arguments.pop(0))
    has_plugin = WITHOUT_PLUGIN not in switches
    _hush()
    arguments = [*_FLAGS, *_of_plugin(has_plugin), *arguments]
    if CHECK in switches:
        return _check(arguments, has_plugin=has_plugin)
    if ENDS_WITH_STDIN in switches:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    # The branches of a block share one budget, so together they ask for far more than they will say. A server that
    # keeps room for all of it leaves some out of the batch; the engine has shared the pool out before it asks.
    os.environ.setdefault("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "64")
    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__")
    return 0


def _of_plugin(wanted: bool) -> list[str]:
    """Its arguments; which plug-ins a server loads is said by its environment."""
    if not wanted:
        os.environ["SGLANG_PLUGINS"] = "none"
        return []
    os.environ.setdefault("SGLANG_PLUGINS", BACKEND)
    # Inputs count all branches in line; RoPE positions, which must stay within the model's context, lie lower.
    os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    return _PLUGIN_FLAGS


def _check(arguments: list[str], *, has_plugin: bool) -> int:
    try:
        check_start(arguments, has_plugin=has_plugin)
    except PluginError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _hush() -> None:
    """Leave out of the server's log what is said at every start, and means nothing here."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")  # of its other processes
    warnings.simplefilter("ignore", UserWarning)
    # What is to follow a warm-up is tried without one too, when nobody listens yet; it comes with a long traceback.
    log = logging.getLogger("sglang.srt.entrypoints.http_server")
    log.addFilter(lambda record: "freeze_gc" not in record.getMessage())


def _end_with_stdin() -> None:
    while os.read(0, 1 << 16):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)
