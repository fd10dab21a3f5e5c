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
    "malformed_rate": "malformed",
    "kept_fraction": "kept",
    "entropy": "entropy",
    "tokens": "tokens",
}


class RunProgress:
    """Takes a run's events in order; `render` draws the present."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._run = controller_pb2.Run(run_id=run_id)
        self._metrics: dict[str, float] = {}
        self._message = ""
        self.milestones: list[str] = []

    def add(self, event: controller_pb2.RunEvent) -> str | None:
        """Takes an event; returns the line that is worth keeping, if it is a milestone."""
        if event.run.stage != self._run.stage:
            self._metrics.clear()
        self._run = event.run
        self._metrics.update(event.metrics)
        self._message = event.message
        if event.kind in {"rollout_progress", "step_finished"}:
            return None
        return milestone(event)

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
    text = event.message or event.kind.replace("_", " ")
    numbers = headline(event.metrics)
    stage = f"[{event.run.stage}] " if event.run.stage else ""
    return f"{event.at.ToDatetime():%H:%M:%S} {stage}{text}{'  ' + numbers if numbers else ''}"


def outcome_line(run: controller_pb2.Run) -> str:
    """How the run stands, in one line."""
    return f"run {run.run_id}: {words.run_state(run.state)}{': ' + run.error if run.error else ''}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 and value == int(value) else f"{value:.3g}"
