"""`npr run`, `npr runs`, `npr stop`, `npr audit`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from npr.buffer.v1 import buffer_pb2
from npr.controller.v1 import controller_pb2
from npr_client.cli.errors import INTERRUPTED
from npr_client.cli.options import JsonOption, StateDirOption, with_client
from npr_client.cli.output import Output
from npr_client.cli.recipes import read_recipe, to_yaml
from npr_client.cli.stack import bring_up
from npr_client.render.progress import RunProgress, outcome_line
from npr_client.render.tables import runs_table
from npr_client.sdk import NprClient
from npr_client.stack.layout import StateDir
from npr_common.errors import InvalidArgumentError, NotFoundError
from npr_common.files import write_atomically

RUN_FAILED = 2
RUN_STOPPED = 3
UNSOUND = 1

RunsDirOption = Annotated[
    Path, typer.Option("--runs-dir", envvar="NPR_RUNS_DIR", help="Where reports are written, one folder a run.")
]


def run(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe's YAML file.")] = None,
    *,
    run_id: Annotated[str | None, typer.Option(help="Name of the run.", show_default="recipe and time")] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="Go on with a stopped or failed run.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe; may be repeated.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Start it and return.")] = False,
    runs_dir: RunsDirOption = Path("runs"),
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Runs a recipe to its report. Starts the local stack when none runs; Ctrl-C leaves the run going on."""
    out = Output(as_json)
    content = _content(recipe, resume, settings or [])
    ensure_stack(state_dir, out)

    name = resume or run_id or _fresh_id(recipe)

    async def work(client: NprClient) -> None:
        started = await (client.runs.resume(name) if resume else client.runs.create(name, content))
        if detach:
            out.result({"run": started}, Text(name))
        else:
            since = started.updated_at.ToDatetime() if resume else None
            out.line(str(await finish(client, name, runs_dir.absolute(), out, since)))

    with going_on(name, out):
        with_client(state_dir, work)


@contextmanager
def going_on(run_id: str, out: Output) -> Iterator[None]:
    """Tells who leaves with Ctrl-C that the run doesn't leave with them."""
    try:
        yield
    except KeyboardInterrupt:
        out.say(f"{run_id} goes on: `npr watch {run_id}` follows it, `npr stop {run_id}` pauses it")
        raise typer.Exit(INTERRUPTED) from None


def _content(recipe: Path | None, resume: str | None, settings: list[str]) -> str:
    if (recipe is None) == (resume is None):
        raise InvalidArgumentError("give either a recipe's file or --resume RUN")
    if recipe is None:
        if settings:
            raise InvalidArgumentError("--set changes a new run's recipe; a run that is resumed keeps its own")
        return ""
    return to_yaml(read_recipe(recipe, settings))


def ensure_stack(state_dir: Path | None, out: Output) -> None:
    """Brings the local stack up, or heals it, unless the environment names a controller elsewhere."""
    if not os.environ.get("NPR_CONTROLLER_ADDRESS"):
        bring_up(StateDir.at(state_dir), out)


def _fresh_id(recipe: Path | None) -> str:
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", recipe.stem if recipe is not None else "run")
    return f"{stem[:40]}-{time.strftime('%Y%m%d-%H%M%S')}"


async def finish(client: NprClient, run_id: str, runs_dir: Path, out: Output, since: datetime | None = None) -> Path:
    """Follows a run to its end and writes its report; the path of report.json, for the last line on standard output.

    Raises:
        typer.Exit: the run failed or was stopped; the report so far is written all the same.
    """
    ended = await follow(client, run_id, out, since)
    path = await write_report(client, run_id, runs_dir)
    out.say(f"report: {path.with_name('report.html')}")
    if ended.state == controller_pb2.RUN_STATE_COMPLETED:
        return path
    out.say(f"error: {outcome_line(ended)}; go on with `npr run --resume {run_id}`")
    raise typer.Exit(RUN_STOPPED if ended.state == controller_pb2.RUN_STATE_STOPPED else RUN_FAILED)


async def follow(client: NprClient, run_id: str, out: Output, since: datetime | None = None) -> controller_pb2.Run:
    """Shows a run's events, those since a moment or all, until it ends or pauses; returns how it stands then."""
    progress = RunProgress(run_id, tell_steps=not out.talk.is_terminal)
    with Live(console=out.talk, transient=True, refresh_per_second=4) as live:
        async for event in client.runs.watch(run_id):
            milestone = progress.add(event)
            if since is not None and event.at.ToDatetime() < since:
                continue
            if out.as_json:
                out.json_line(event)
            if milestone:
                out.say(milestone)
            live.update(progress.render())
    return await client.runs.get(run_id)


async def write_report(client: NprClient, run_id: str, runs_dir: Path) -> Path:
    """Writes report.html and report.json into the run's folder; returns the path of the latter."""
    report = await client.runs.report(run_id)
    folder = runs_dir / run_id
    write_atomically(folder / "report.html", report.html.encode())
    write_atomically(folder / "report.json", report.json.encode())
    return folder / "report.json"


def runs(
    limit: Annotated[int, typer.Option(min=1)] = 20, state_dir: StateDirOption = None, as_json: JsonOption = False
) -> None:
    """Lists runs, newest first."""
    out = Output(as_json)
    found = with_client(state_dir, lambda client: client.runs.list(limit))
    if as_json:
        for each in found:
            out.json_line(each)
    else:
        out.results.print(runs_table(found) if found else Text("no runs"))


def stop(
    run_id: Annotated[str, typer.Argument(metavar="RUN")], state_dir: StateDirOption = None, as_json: JsonOption = False
) -> None:
    """Pauses a run; `npr run --resume RUN` goes on with it."""
    stopped = with_client(state_dir, lambda client: client.runs.stop(run_id))
    Output(as_json).result(stopped, Text(outcome_line(stopped)))


def audit(
    run_id: Annotated[str, typer.Argument(metavar="RUN")], state_dir: StateDirOption = None, as_json: JsonOption = False
) -> None:
    """Recounts all that a run holds: every group consumed once, nothing lost; exit code 1 when unsound."""
    found = with_client(state_dir, lambda client: client.trajectories.audit(run_id))
    if not found.counts.trajectories_expected and not found.problems:
        raise NotFoundError(f"the buffer holds nothing of a run {run_id!r}: `npr runs` lists the runs")
    Output(as_json).result({"sound": not found.problems, "audit": found}, _drawn(found))
    if found.problems:
        raise typer.Exit(UNSOUND)


def _drawn(found: buffer_pb2.AuditRunResponse) -> Group:
    counts = found.counts
    groups = (
        f"groups: {counts.waiting} wait, {counts.leased} leased, {counts.ready} ready, {counts.consumed} consumed, "
        f"{counts.discarded} discarded; trajectories: {counts.trajectories}/{counts.trajectories_expected}"
    )
    consumers = [Text(f"  {consumer}: {count} groups") for consumer, count in sorted(found.consumed_by.items())]
    problems = [Text(problem, style="red") for problem in found.problems] or [Text("sound", style="green")]
    return Group(Text(groups), *consumers, *problems)
