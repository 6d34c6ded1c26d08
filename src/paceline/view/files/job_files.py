"""The job file and the plan of a run, for others to see: values of variables that look like secrets are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.agent.redaction import REDACTED, Redactor, looks_secret
from paceline.errors import PacelineError
from paceline.storage.regular_files import open_regular
from paceline.view.files import run_files
from paceline.view.text.yaml_output import dump

_LONGEST = 1 << 20  # bytes of a job file
_LARGEST_PLAN = 16 << 20  # bytes; that of 30,000 workers. Converted to YAML, more would take minutes
_MOST_COMPARED = 500_000_000  # bytes in all: each secret is searched in the whole plan. This takes seconds


def job_form(folder: Path) -> dict[str, Any]:
    """`text`: the job file with everything that was set on the command line; None: it is not on this machine."""
    try:
        with open(open_regular(str(folder / "job.yaml"), follow=True), "rb") as file:
            text = file.read(_LONGEST).decode("utf-8", "replace")
    except OSError:
        return {"text": None}
    plan = run_files.plan(folder).fields or {}
    return {"text": Redactor(*_environments(plan))(text)}


def plan_form(folder: Path) -> dict[str, Any]:
    """PacelineError: it is too large to be shown. That of another user's run may be made for this."""
    path = folder / "plan.json"
    try:
        size = path.stat().st_size
    except OSError:
        return {"text": None, "plan": None}
    if size > _LARGEST_PLAN:
        raise PacelineError(f"plan.json is too large to be shown: {size >> 20} MiB")
    plan = run_files.load_object(path)
    if plan is None:
        return {"text": None, "plan": None}
    redactor = Redactor(*_environments(plan))
    if redactor.count * size > _MOST_COMPARED:
        raise PacelineError(
            f"plan.json cannot be shown: {redactor.count} values look like secrets, "
            "too many to redact in a plan of this size"
        )
    shown = _redacted(plan, redactor)
    return {"text": dump(shown), "plan": shown}


def _environments(data: Any) -> list[dict[str, str]]:
    """All mappings in the plan whose values are text: the variables of tasks are among them."""
    if isinstance(data, list):
        return [each for value in data for each in _environments(value)]
    if not isinstance(data, dict):
        return []
    own = {str(name): value for name, value in data.items() if isinstance(value, str)}
    return [own, *(each for value in data.values() for each in _environments(value))]


def _redacted(data: Any, redactor: Redactor) -> Any:
    if isinstance(data, str):
        return redactor(data)
    if isinstance(data, list):
        return [_redacted(value, redactor) for value in data]
    if isinstance(data, dict):
        return {
            name: REDACTED if isinstance(value, str) and looks_secret(str(name), value) else _redacted(value, redactor)
            for name, value in data.items()
        }
    return data
