"""The Python API: jobs, runs, and what users can do with them. Its functions print nothing and raise PacelineError."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.client.deletion import Deleted, NotDeleted
    from paceline.client.jobs import Job, Plan, Rendered, load, plan, render
    from paceline.client.run import Event, LogLine, Point, Run, Stacks
    from paceline.client.run_listing import RunList, get, runs
    from paceline.client.run_snapshots import Snapshot
    from paceline.client.run_status import Status, TaskStatus
    from paceline.client.submission import submit
    from paceline.client.wait import EndedBefore, WaitTimeout
    from paceline.errors import PacelineError, UsageError
    from paceline.job.errors import JobError
    from paceline.view.run_folders import NoRun

# The public names and their modules, which are imported on first use: the command line needs few of them.
_MODULES = {
    "paceline.client.jobs": ("load", "Job", "plan", "Plan", "render", "Rendered"),
    "paceline.client.submission": ("submit",),
    "paceline.client.run_listing": ("runs", "get", "RunList"),
    "paceline.client.run": ("Run", "Event", "LogLine", "Point", "Stacks"),
    "paceline.client.run_status": ("Status", "TaskStatus"),
    "paceline.client.run_snapshots": ("Snapshot",),
    "paceline.client.deletion": ("Deleted", "NotDeleted"),
    "paceline.client.wait": ("WaitTimeout", "EndedBefore"),
    "paceline.errors": ("PacelineError", "UsageError"),
    "paceline.job.errors": ("JobError",),
    "paceline.view.run_folders": ("NoRun",),
}
__all__ = [
    "Deleted", "EndedBefore", "Event", "Job", "JobError", "LogLine", "NoRun", "NotDeleted", "PacelineError", "Plan",
    "Point", "Rendered", "Run", "RunList", "Snapshot", "Stacks", "Status", "TaskStatus", "UsageError", "WaitTimeout",
    "get", "load", "plan", "render", "runs", "submit",
]  # fmt: skip
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline.client' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
