"""The `npr` command as a test runs it: a real process in one folder, with one local stack."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CALL_SECONDS = 600.0

# A test run in the background of a shell has SIGINT ignored, which its children inherit. The child restores it itself:
# a `preexec_fn` would fork, and gRPC's fork handlers can abort the child of a process that has calls under way.
LAUNCH = "; ".join(
    (
        "import signal",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        "from npr_client.cli.main import main",
        "main()",
    )
)


class NprCommand:
    """`npr` in `folder`; its stack lives in `folder/npr` whatever NPR_* the caller's environment has.

    `settings` are environment variables of the stack's services.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.state_dir = folder / "npr"
        foreign = {name: value for name, value in os.environ.items() if not name.startswith("NPR_")}
        self.environment = {**foreign, **(settings or {}), "NPR_STATE_DIR": str(self.state_dir)}

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Starts a call and returns its process, with its output as text."""
        return subprocess.Popen(
            (sys.executable, "-c", LAUNCH, *arguments),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str, code: int | None = 0, seconds: float = CALL_SECONDS) -> tuple[str, str]:
        """Standard output and error of a call. Raises AssertionError unless it ends with `code` (None: any)."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=seconds)
        if code is not None and process.returncode != code:
            raise AssertionError(f"npr {' '.join(arguments)} ended with {process.returncode}, not {code}: {err}")
        return out, err


@contextmanager
def npr_with_stack(folder: Path, settings: Mapping[str, str] | None = None) -> Iterator[NprCommand]:
    """`npr` in `folder` with a stack that is up."""
    command = NprCommand(folder, settings)
    command("up")
    try:
        yield command
    finally:
        command("down")
