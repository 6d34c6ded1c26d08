"""The Python API: jobs, runs, and what users can do with them. Its functions print nothing and raise PacelineError."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.client.control.deletion import Deleted, NotDeleted
    from paceline.client.control.pause import NotPaused
    from paceline.client.control.wait import EndedBefore, WaitTimeout
    from paceline.client.diagnosis.profile import Profile, TaskProfile
    from paceline.client.diagnosis.stacks import Stacks
    from paceline.client.jobs import Job, Plan, Rendered, load, plan, render
    from paceline.client.reading.run_status import Status, TaskStatus
    from paceline.client.run import Event, LogLine, Point, Run
    from paceline.client.run_listing import RunList, get, runs
    from paceline.client.snapshots.run_snapshots import Snapshot
    from paceline.client.submission.submit import submit
    from paceline.errors import PacelineError, UsageError
    from paceline.job.errors import JobError, Problem
    from paceline.view.diagnosis.stacks import ProcessStacks, ThreadStacks
    from paceline.view.files.run_folders import NoRun

# The public names and their modules, which are imported on first use: the command line needs few of them.
_MODULES = {
    "paceline.client.jobs": ("load", "Job", "plan", "Plan", "render", "Rendered"),
    "paceline.client.submission.submit": ("submit",),
    "paceline.client.run_listing": ("runs", "get", "RunList"),
    "paceline.client.run": ("Run", "Event", "LogLine", "Point"),
    "paceline.client.reading.run_status": ("Status", "TaskStatus"),
    "paceline.client.snapshots.run_snapshots": ("Snapshot",),
    "paceline.client.diagnosis.stacks": ("Stacks",),
    "paceline.client.diagnosis.profile": ("Profile", "TaskProfile"),
    "paceline.client.control.deletion": ("Deleted", "NotDeleted"),
    "paceline.client.control.pause": ("NotPaused",),
    "paceline.client.control.wait": ("WaitTimeout", "EndedBefore"),
    "paceline.errors": ("PacelineError", "UsageError"),
    "paceline.job.errors": ("JobError", "Problem"),
    "paceline.view.files.run_folders": ("NoRun",),
    "paceline.view.diagnosis.stacks": ("ProcessStacks", "ThreadStacks"),
}
__all__ = [
    "Deleted", "EndedBefore", "Event", "Job", "JobError", "LogLine", "NoRun", "NotDeleted", "NotPaused",
    "PacelineError", "Plan", "Point", "Problem", "ProcessStacks", "Profile", "Rendered", "Run", "RunList", "Snapshot",
    "Stacks", "Status", "TaskProfile", "TaskStatus", "ThreadStacks", "UsageError", "WaitTimeout", "get", "load", "plan",
    "render", "runs", "submit",
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
