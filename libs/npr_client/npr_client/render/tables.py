"""Tables of the stack, of jobs, of runs and of evaluated stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from npr.controller.v1 import controller_pb2
from npr.rollout.v1 import rollout_pb2
from npr_client.render import words
from npr_client.stack.probes import Health
from npr_client.stack.report import ComponentStatus, StackStatus
from npr_client.stack.state import Phase

HEALTH_STYLES = {
    Health.SERVING: "green",
    Health.NOT_SERVING: "yellow",
    Health.UNREACHABLE: "red",
    Health.STOPPED: "dim",
}


def duration(seconds: float) -> str:
    """Such as `3 s`, `12 min 5 s`, `4 h 12 min`."""
    whole = int(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def stack_table(status: StackStatus) -> RenderableType:
    """What `npr status` prints."""
    table = plain_table("service", "health", "address", "pid", "uptime", "restarts")
    for component in status.components:
        table.add_row(
            component.name,
            Text(component.health, style=HEALTH_STYLES[component.health]),
            component.address or "",
            str(component.pid or ""),
            duration(component.uptime_seconds) if component.uptime_seconds is not None else "",
            str(component.restarts),
        )
    return Group(table, *_stack_notes(status))


def _stack_notes(status: StackStatus) -> Iterable[Text]:
    if status.queue is not None:
        queue = status.queue
        yield Text(
            f"queue   {queue.waiting_groups} groups wait (oldest {duration(queue.oldest_waiting_seconds)}), "
            f"{queue.leased_groups} leased, {queue.expired_leases} leases expired so far"
        )
    if status.policy is not None:
        named = f"{status.policy.line}@{status.policy.version}  {status.policy.digest[:12]}"
        yield Text(f"policy  {named if status.policy.line else 'none'}, decoded by {status.policy.backend}")
        if status.policy.condition:
            yield Text(f"        {status.policy.condition}", style="yellow")
    lives = any(component.health is not Health.STOPPED for component in status.components)
    if not status.supervisor_alive:
        yield Text("no supervisor: `npr up` heals the stack" if lives else "not running: `npr up` starts it", "yellow")
    for component in status.components:
        if component.last_error and component.phase is not Phase.RUNNING:
            yield _trouble(component)


def _trouble(component: ComponentStatus) -> Text:
    return Text(f"{component.name}: {component.last_error}", style="red")


def jobs_table(jobs: Iterable[rollout_pb2.Job]) -> Table:
    """One line a job."""
    table = plain_table("job", "state", "prompts", "trajectories", "verdicts", "outcomes", "submitted")
    for job in jobs:
        table.add_row(
            job.job_id,
            words.job_state(job.state),
            str(job.prompts),
            f"{job.trajectories}/{job.trajectories_expected}",
            counts(job.verdicts),
            counts(job.outcomes),
            _when(job.submitted_at.seconds, job.submitted_at.ToDatetime().isoformat(sep=" ", timespec="seconds")),
        )
    return table


def runs_table(runs: Iterable[controller_pb2.Run]) -> Table:
    """One line a run."""
    table = plain_table("run", "recipe", "state", "stage", "phase", "step", "updated (UTC)", "error")
    for run in runs:
        table.add_row(
            run.run_id,
            run.recipe,
            words.run_state(run.state),
            run.stage,
            run.phase,
            f"{run.step}/{run.steps}" if run.steps else "",
            _when(run.updated_at.seconds, run.updated_at.ToDatetime().isoformat(sep=" ", timespec="seconds")),
            run.error,
        )
    return table


def stages_table(stages: Iterable[Mapping[str, Any]]) -> Table:
    """What was measured after each stage, from a report's `stages`."""
    table = plain_table(
        "stage", "problems", "accuracy", "format pass", "parallel", "branches", "tokens", "critical", "time"
    )
    for stage in stages:
        table.add_row(
            str(stage["name"]),
            str(stage["prompts"]),
            f"{stage['accuracy']:.3f} [{stage['accuracy_low']:.3f}, {stage['accuracy_high']:.3f}]",
            f"{stage['format_pass_rate']:.3f}",
            f"{stage['parallel_rate']:.3f}",
            f"{stage['mean_branches']:.2f}",
            f"{stage['total_tokens']:.1f}",
            f"{stage['critical_path_tokens']:.1f}",
            duration(stage["wall_seconds"]),
        )
    return table


def counts(by_name: Mapping[str, int]) -> str:
    """Such as `3 correct, 1 incorrect`."""
    return ", ".join(f"{count} {name.lower().replace('_', ' ')}" for name, count in sorted(by_name.items()) if count)


def plain_table(*columns: str) -> Table:
    """A table without lines. Its first column, the name to copy, is never broken."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index == 0)
    return table


def _when(seconds: int, text: str) -> str:
    return text if seconds else ""
