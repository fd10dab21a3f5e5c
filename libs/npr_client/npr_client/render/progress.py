"""A run while it goes on: where it is, its newest numbers, and a line for every stage that has been evaluated."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from npr.controller.v1 import controller_pb2
from npr_client.render import words

# Shown in this order when an event brings them; the rest is in the report.
HEADLINE_METRICS = {
    "reward_mean": "reward",
    "accuracy": "accuracy",
    "format_pass_rate": "format",
    "malformed_rate": "malformed",
    "parallel_rate": "parallel",
    "kept_fraction": "kept",
    "loss": "loss",
    "entropy": "entropy",
    "total_tokens": "tokens",
    "critical_path_tokens": "critical path",
    "seconds": "seconds",
}
# Too frequent, or told by the command's last line.
PASSING_KINDS = frozenset({"rollout_progress", "train_progress", "sampled", "resampled", "step_finished", "failed"})


class RunProgress:
    """Takes a run's events in order; `render` draws the present."""

    def __init__(self, run_id: str, *, tell_steps: bool = False) -> None:
        """`tell_steps` makes every finished step a milestone, for a log that shows no live display."""
        self._run_id = run_id
        self._passing = PASSING_KINDS - {"step_finished"} if tell_steps else PASSING_KINDS
        self._run = controller_pb2.Run(run_id=run_id)
        self._metrics: dict[str, float] = {}
        self._message = ""

    def add(self, event: controller_pb2.RunEvent) -> str | None:
        """Takes an event; returns the line that is worth keeping, if it is a milestone."""
        if event.run.stage != self._run.stage:
            self._metrics.clear()
        self._run = event.run
        self._metrics.update(event.metrics)
        self._message = event.message
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
        return Group(line, Text(headline(self._metrics) or self._message, style="dim"))


def headline(metrics: Mapping[str, float]) -> str:
    """The few numbers that say how a run fares."""
    shown = [f"{label} {_number(metrics[name])}" for name, label in HEADLINE_METRICS.items() if name in metrics]
    return "  ".join(shown)


def milestone(event: controller_pb2.RunEvent) -> str:
    """One line about an event."""
    run = event.run
    stage = f"[{run.stage}] " if run.stage else ""
    step = f" {run.step}/{run.steps}" if event.kind == "step_finished" else ""
    text = event.message or f"{event.kind.replace('_', ' ')}{step}  {headline(event.metrics)}"
    return f"{event.at.ToDatetime():%H:%M:%S} {stage}{text}".rstrip()


def outcome_line(run: controller_pb2.Run) -> str:
    """How the run stands, in one line."""
    return f"run {run.run_id}: {words.run_state(run.state)}{': ' + run.error if run.error else ''}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 and value == int(value) else f"{value:.3g}"
