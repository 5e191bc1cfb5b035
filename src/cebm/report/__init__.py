"""Run directories to one self-contained HTML page."""

from cebm.report.page import write_report

__all__ = ["write_report"]
