"""The command's entry point: all commands in one flat list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Annotated

import typer

from npr_client.cli import doctor, evaluate, generate, jobs, policies, runs, show, stack, verify
from npr_client.cli.errors import NprGroup

app = typer.Typer(
    name="npr",
    cls=NprGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Native Parallel Reasoner: train and run models that reason in parallel.",
)

GROUPS: Mapping[str, tuple[Callable[..., None], ...]] = {
    "Local stack": (stack.up, stack.down, stack.status, doctor.doctor),
    "Runs": (runs.run, runs.runs, runs.stop, runs.audit),
    "Jobs": (jobs.submit, jobs.watch, jobs.jobs, jobs.cancel, generate.generate),
    "Policies": (policies.publish, policies.export, policies.serve_policy),
    "Reading and judging": (show.show, show.trajectories, verify.verify),
}

for panel, commands in GROUPS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.command("eval", rich_help_panel="Runs")(evaluate.evaluate)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(metadata.version("npr-client"))
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", envvar="NPR_DEBUG", help="Show tracebacks.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Native Parallel Reasoner: train and run models that reason in parallel."""


def main() -> None:
    """The `npr` command."""
    app()


if __name__ == "__main__":
    main()
