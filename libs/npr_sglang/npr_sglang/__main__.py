"""Starts SGLang, unmodified, with the plug-in: `python -m npr_sglang [arguments of sglang.launch_server]`.

With `--ends-with-stdin` as the first argument the server ends when its standard input does, which is when the process
that holds the other end is gone, however that ended: a server that nobody asks would keep its memory, and a processor.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading

from npr_sglang.contract import BACKEND

ENDS_WITH_STDIN = "--ends-with-stdin"

_FLAGS = ["--radix-cache-backend", BACKEND, "--page-size", "1", "--incremental-streaming-output"]


def main() -> None:
    """Start the server; returns when it ends."""
    arguments = sys.argv[1:]
    if arguments[:1] == [ENDS_WITH_STDIN]:
        arguments = arguments[1:]
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    os.environ.setdefault("SGLANG_PLUGINS", BACKEND)
    # Inputs count all branches in line; RoPE positions, which must stay within the model's context, lie lower.
    os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    sys.argv = ["sglang.launch_server", *_FLAGS, *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__")


def _end_with_stdin() -> None:
    while os.read(0, 1 << 16):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
