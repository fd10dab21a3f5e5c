"""The report as one HTML file without external assets."""

from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined

from npr_controller.report.charts import curve_chart, stage_chart
from npr_controller.report.document import Report
from npr_controller.report.trees import view

_environment = Environment(
    loader=PackageLoader("npr_controller.report", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render_html(report: Report) -> str:
    """The page. What the model and the data said is escaped."""
    return _environment.get_template("report.html.j2").render(
        report=report,
        stage_chart=stage_chart(report) if report.stages else "",
        curve_charts=[(curve, curve_chart(curve)) for curve in report.curves],
        trajectories={
            stage: [view(shown, report.dialect) for shown in shown_list]
            for stage, shown_list in report.trajectories.items()
        },
        created=_utc(report.created_at),
        updated=_utc(report.updated_at),
    )


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
