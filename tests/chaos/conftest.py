"""The table of faults at the end of the session."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The faults and how long each took, from the reports of the tests, wherever they ran."""
    rows = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "fault" and report.when == "call"
    ]
    if not rows:
        return
    terminalreporter.section(f"{len(rows)} faults")
    terminalreporter.write_line(f"{'framework':12} {'fault':16} {'task':10} {'cause':15} {'next step after':>15}")
    for framework, fault, task, cause, seconds in rows:
        after = "-" if seconds is None else f"{seconds:.1f} s"
        terminalreporter.write_line(f"{framework:12} {fault:16} {task:10} {cause:15} {after:>15}")
