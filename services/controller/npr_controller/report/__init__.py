"""Reports of a run: `report.json` and `report.html`."""

from npr_controller.report.document import Report, build_report
from npr_controller.report.html import render_html

__all__ = ["Report", "build_report", "render_html"]
