"""The report's figures as SVG that takes the page's colours.

Text and axes are drawn in `currentColor`, so that one figure serves a light and a dark page. No figure refers to
anything outside itself.
"""

import io
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from npr_controller.report.document import Curve, Report, StageRow

# Drawn in this colour, then replaced: matplotlib knows no `currentColor`.
_INK = "#010203"
_FIRST = "#3b82c4"
_SECOND = "#d9822b"
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
}
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_PROLOGUE = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_IDS = re.compile(r'(\bid="|url\(#|xlink:href="#)')
_LINKS = re.compile(r"\bxlink:href=")

# matplotlib's style is global to the process; reports may be asked for at once.
_drawing = threading.Lock()


@dataclass(frozen=True)
class Series:
    """One line of a learning curve: a metric's name in the points, and what it is called."""

    metric: str
    label: str
    color: str = _FIRST


_RL_PANELS: tuple[tuple[str, tuple[Series, ...]], ...] = (
    ("Reward", (Series("reward_mean", "reward"),)),
    ("Accuracy", (Series("accuracy", "accuracy"),)),
    ("Form", (Series("format_pass_rate", "format pass"), Series("parallel_rate", "parallel", _SECOND))),
    ("Entropy", (Series("entropy", "entropy"),)),
    ("Tokens", (Series("total_tokens", "total"), Series("critical_path_tokens", "critical path", _SECOND))),
    ("Seconds", (Series("rollout_seconds", "rollout"), Series("seconds", "learner", _SECOND))),
)
_SFT_PANELS: tuple[tuple[str, tuple[Series, ...]], ...] = (
    ("Loss", (Series("loss", "loss"),)),
    ("Learning rate", (Series("learning_rate", "learning rate"),)),
    ("Gradient norm", (Series("grad_norm", "gradient norm"),)),
)


def stage_chart(report: Report) -> Markup:
    """Every measure a panel, every stage a bar."""
    panels: tuple[Callable[[Axes, Sequence[StageRow]], None], ...] = (
        lambda axes, rows: _rates(axes, rows, "Format pass rate", [row.format_pass_rate for row in rows]),
        _accuracy,
        lambda axes, rows: _rates(axes, rows, "Genuine parallel rate", [row.genuine_parallel_rate for row in rows]),
        lambda axes, rows: _bars(axes, rows, "Mean branches", [row.mean_branches for row in rows]),
        _tokens,
        lambda axes, rows: _bars(axes, rows, "Mean reward", [row.reward for row in rows]),
        lambda axes, rows: _bars(axes, rows, "Entropy, last step (nats)", [row.entropy for row in rows]),
        lambda axes, rows: _bars(axes, rows, "Wall-clock seconds", [row.wall_seconds for row in rows]),
    )
    with _drawing, mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 5.2), layout="constrained")
        for axes, panel in zip(figure.subplots(2, 4).flat, panels, strict=True):
            panel(axes, report.stages)
        return _svg(figure, "stages")


def curve_chart(curve: Curve) -> Markup:
    """A stage's training, a panel a group of metrics; metrics that the learner doesn't report are left out."""
    known = {name for point in curve.points for name in point}
    panels = [
        (title, [series for series in group if series.metric in known])
        for title, group in (_RL_PANELS if curve.unit == "step" else _SFT_PANELS)
    ]
    drawn = [(title, group) for title, group in panels if group]
    if not drawn:
        return Markup()
    with _drawing, mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 2.3), layout="constrained")
        for axes, (title, group) in zip(figure.subplots(1, len(drawn), squeeze=False).flat, drawn, strict=True):
            _lines(axes, curve, title, group)
        return _svg(figure, f"curve-{curve.stage}")


def _rates(axes: Axes, rows: Sequence[StageRow], title: str, values: Sequence[float]) -> None:
    _bars(axes, rows, title, values)
    axes.set_ylim(0, 1.12)


def _accuracy(axes: Axes, rows: Sequence[StageRow]) -> None:
    _bars(axes, rows, "Accuracy, with interval", [row.accuracy for row in rows], labelled=False)
    for place, row in enumerate(rows):
        axes.plot([place, place], [row.accuracy_low, row.accuracy_high], color=_INK, linewidth=1.5)
        axes.text(place, row.accuracy_high + 0.02, f"{row.accuracy:.3f}", ha="center", fontsize=8)
    axes.set_ylim(0, 1.12)


def _tokens(axes: Axes, rows: Sequence[StageRow]) -> None:
    places = range(len(rows))
    total = [row.total_tokens for row in rows]
    critical = [row.critical_path_tokens for row in rows]
    axes.bar([place - 0.2 for place in places], total, 0.38, color=_FIRST, label="total")
    axes.bar([place + 0.2 for place in places], critical, 0.38, color=_SECOND, label="critical path")
    axes.set_title("Tokens a response", loc="left")
    axes.set_ylim(0, max([1.0, *total]) * 1.35)
    axes.legend(fontsize=8, loc="upper right", ncols=2)
    _names(axes, rows)


def _bars(
    axes: Axes, rows: Sequence[StageRow], title: str, values: Sequence[float | None], *, labelled: bool = True
) -> None:
    measured = [(place, value) for place, value in enumerate(values) if value is not None]
    bars = axes.bar([place for place, _ in measured], [value for _, value in measured], 0.6, color=_FIRST)
    if labelled:
        axes.bar_label(bars, fmt="%.3g", fontsize=8, padding=1)
        axes.margins(y=0.15)
    axes.axhline(0, color=_INK, linewidth=0.6)
    axes.set_title(title, loc="left")
    _names(axes, rows)


def _names(axes: Axes, rows: Sequence[StageRow]) -> None:
    axes.set_xticks(range(len(rows)), [row.name for row in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.tick_params(length=2)


def _lines(axes: Axes, curve: Curve, title: str, group: Sequence[Series]) -> None:
    for series in group:
        points = [(point["step"], point[series.metric]) for point in curve.points if series.metric in point]
        marker = "o" if len(points) < 40 else ""
        axes.plot(*zip(*points, strict=True), color=series.color, label=series.label, marker=marker, markersize=2.5)
    axes.set_title(title, loc="left")
    axes.set_xlabel(curve.unit)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if len(group) > 1:
        axes.legend(fontsize=8)


def _svg(figure: Figure, name: str) -> Markup:
    """The figure as an element of the page: ids of its own, the page's ink, no prologue and no metadata."""
    target = io.StringIO()
    figure.savefig(target, format="svg")
    text = _PROLOGUE.sub("", _METADATA.sub("", target.getvalue()))
    text = _IDS.sub(lambda match: f"{match.group()}{name}-", text)
    text = _LINKS.sub("href=", text).replace(_INK, "currentColor")
    return Markup(text)
