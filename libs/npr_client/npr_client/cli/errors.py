"""Errors as a person meets them: one line, an exit code, a traceback only with `--debug`."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from npr_common.errors import NprError

FAILED = 2
INTERRUPTED = 130
FAULT = 70
BROKEN_PIPE = 141


class NprGroup(TyperGroup):
    """The command group whose commands end in one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except NprError as error:
            _fail(ctx, _one_line(error), FAILED)
        except BrokenPipeError:
            # Who read our output, such as `head`, has enough; the interpreter's last flush must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            _fail(ctx, f"{error.strerror or error}{where}", FAILED)
        except KeyboardInterrupt:
            _fail(ctx, "interrupted", INTERRUPTED)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:
            # The boundary where a fault of ours becomes a line; typer's own usage errors pass through.
            if type(error).__module__.startswith(("typer", "click")):
                raise
            fault = f"a fault of npr's own: {type(error).__name__}: {error}; `npr --debug ...` shows where"
            _fail(ctx, fault, FAULT)


def _fail(ctx: Any, line: str, code: int) -> None:
    """Prints the line and exits; re-raises what is being handled instead when the user asked to see it."""
    if ctx.params.get("debug"):
        raise  # noqa: PLE0704 - called from the handler
    print(f"error: {line}", file=sys.stderr)  # noqa: T201
    raise typer.Exit(code)


def _one_line(error: NprError) -> str:
    """The message; violated fields that it doesn't name are added."""
    missing = {field: why for field, why in error.field_violations.items() if field not in error.message}
    fields = "; ".join(f"{field}: {why}" for field, why in missing.items())
    return " ".join(f"{error.message}{' — ' + fields if fields else ''}".split())
