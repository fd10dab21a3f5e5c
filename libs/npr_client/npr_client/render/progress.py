"""A run while it goes on: where it is, its newest numbers, and a line for every stage that has been evaluated."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from npr.controller.v1 import controller_pb2
from npr_client.render import words

# Shown in this order when an event brings them, as many as there is room for; the rest is in the report.
HEADLINE_METRICS = {
    "reward_mean": "reward",
    "accuracy": "accuracy",
    "format_pass_rate": "format",
    "parallel_rate": "parallel",
    "loss": "loss",
    "malformed_rate": "malformed",
    "kept_fraction": "kept",
    "entropy": "entropy",
    "total_tokens": "tokens",
    "critical_path_tokens": "critical path",
    "seconds": "seconds",
}
LINE_COLUMNS = 120
# Progress of stages without steps; each event says where the stage is.
STEPLESS_KINDS = frozenset({"sampling", "fine_tuning"})
# What a log that shows no live display is told besides milestones.
LOGGED_KINDS = STEPLESS_KINDS | {"step_finished"}
# Too frequent, or told by the command's last line.
PASSING_KINDS = LOGGED_KINDS | {"rollout_progress", "train_progress", "sampled", "resampled", "failed"}


class RunProgress:
    """Takes a run's events in order; `render` draws the present."""

    def __init__(self, run_id: str, *, tell_steps: bool = False) -> None:
        """`tell_steps` makes milestones of finished steps, and of progress in stages without steps: for a log without a
        live display.
        """
        self._run_id = run_id
        self._passing = PASSING_KINDS - LOGGED_KINDS if tell_steps else PASSING_KINDS
        self._run = controller_pb2.Run(run_id=run_id)
        self._metrics: dict[str, float] = {}
        self._message = ""
        self._is_stepless = False

    def add(self, event: controller_pb2.RunEvent) -> str | None:
        """Takes an event; returns the line that is worth keeping, if it is a milestone."""
        if event.run.stage != self._run.stage:
            self._metrics.clear()
        self._run = event.run
        self._metrics.update(event.metrics)
        self._message = event.message
        self._is_stepless = event.kind in STEPLESS_KINDS
        return None if event.kind in self._passing else milestone(event)

    def render(self) -> RenderableType:
        """Two lines: a bar with the place in the run, and the newest numbers."""
        run = self._run
        place = f"{run.stage or 'starting'} · {run.phase}" if run.phase else (run.stage or "starting")
        line = Table.grid(padding=(0, 2))
        step = f"step {run.step}/{run.steps}" if run.steps else ""
        line.add_row(
            Text(self._run_id, style="bold cyan"),
            Text(place),
            ProgressBar(total=max(run.steps, 1), completed=run.step, width=30),
            Text(step),
        )
        numbers = "" if self._is_stepless else headline(self._metrics)
        return Group(line, Text(numbers or self._message, style="dim"))


def headline(metrics: Mapping[str, float], columns: int | None = None) -> str:
    """The few numbers that say how a run fares: the first ones that fit."""
    shown = [f"{label} {_number(metrics[name])}" for name, label in HEADLINE_METRICS.items() if name in metrics]
    while columns is not None and len("  ".join(shown)) > columns:
        shown.pop()
    return "  ".join(shown)


def milestone(event: controller_pb2.RunEvent) -> str:
    """One line about an event; numbers don't make it longer than `LINE_COLUMNS`."""
    run = event.run
    stage = f"[{run.stage}] " if run.stage else ""
    begin = f"{event.at.ToDatetime():%H:%M:%S} {stage}"
    if event.message:
        return f"{begin}{event.message}"
    begin += f"step {run.step}/{run.steps}  " if event.kind == "step_finished" else f"{event.kind.replace('_', ' ')}  "
    return f"{begin}{headline(event.metrics, LINE_COLUMNS - len(begin))}".rstrip()


def outcome_line(run: controller_pb2.Run) -> str:
    """How the run stands, in one line."""
    return f"run {run.run_id}: {words.run_state(run.state)}{': ' + run.error if run.error else ''}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 and value == int(value) else f"{value:.3g}"
