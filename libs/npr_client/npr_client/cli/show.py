"""`npr show` and `npr trajectories`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from npr.buffer.v1 import buffer_pb2
from npr_client.cli.options import DialectOption, JsonOption, StateDirOption, dialect_named, with_client
from npr_client.cli.output import Output
from npr_client.render import words
from npr_client.render.tables import plain_table
from npr_client.render.tree import trajectory_tree
from npr_client.render.view import view_trajectory
from npr_client.sdk import NprClient
from npr_common.errors import FailedPreconditionError, NotFoundError

# Where the rollout service keeps the trajectories of jobs.
JOBS_RUN = "jobs"


def show(
    trajectory_id: Annotated[str, typer.Argument(metavar="TRAJECTORY")],
    run_id: Annotated[str | None, typer.Option("--run", help="Its run.", show_default="searched")] = None,
    dialect: DialectOption = "",
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draws a trajectory as a tree: plans, branches with their budgets, forced marks, takeaways, verdict."""
    named = dialect_named(dialect) if dialect else None

    async def work(client: NprClient) -> buffer_pb2.GetTrajectoryResponse:
        runs = [run_id] if run_id is not None else [JOBS_RUN, *await _known_runs(client)]
        try:
            return await client.trajectories.find(runs, trajectory_id)
        except NotFoundError as error:
            if not await _is_job(client, trajectory_id):
                raise
            message = (
                f"{trajectory_id} is a job: `npr trajectories {JOBS_RUN} --channel {trajectory_id}` lists its "
                "trajectories, `npr show` draws one"
            )
            raise NotFoundError(message, reason="TRAJECTORY_NOT_FOUND") from error

    found = with_client(state_dir, work)
    table = named or dialect_named(found.group.dialect or "npr")
    data = {
        "run_id": found.group.run_id,
        "channel": found.group.channel,
        "trajectory": found.trajectory.trajectory,
        "score": found.trajectory.score,
        "tree": view_trajectory(found.trajectory.trajectory, table).to_dict(),
    }
    Output(as_json).result(data, trajectory_tree(found.trajectory, table))


async def _known_runs(client: NprClient) -> list[str]:
    try:
        return [run.run_id for run in await client.runs.list()]
    except FailedPreconditionError:  # a stack without a controller has jobs all the same
        return []


async def _is_job(client: NprClient, name: str) -> bool:
    return bool(await client.trajectories.groups(JOBS_RUN, name))


def trajectories(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help=f"A run's id; `{JOBS_RUN}` holds those of jobs.")],
    channel: Annotated[str, typer.Option(help="Such as a job's id, or `npr/train/3`.", show_default="all")] = "",
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lists a run's trajectories, so that `npr show` can be told one."""
    out = Output(as_json)
    groups = with_client(state_dir, lambda client: client.trajectories.groups(run_id, channel))
    if as_json:
        for group in groups:
            out.json_line(group)
    else:
        out.results.print(_table(groups))


def _table(groups: list[buffer_pb2.GroupSummary]) -> Table:
    table = plain_table("trajectory", "outcome", "verdict", "reward", "tokens", "critical", "forks", "branches")
    for group in groups:
        for sample in group.samples:
            table.add_row(
                f"{group.group_id}/{sample.sample_index}",
                words.outcome(sample.outcome),
                words.verdict(sample.verdict),
                f"{sample.reward:g}",
                str(sample.total_tokens),
                str(sample.critical_path_tokens),
                str(sample.forked_blocks),
                str(sample.branches),
            )
    return table
