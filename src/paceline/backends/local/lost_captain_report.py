"""Writes the report of a run if its captain could not, from the state that the captain saved."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.agent.run_files import replace, stamp
from paceline.storage.regular_files import append_to_regular
from paceline.view.files.run_files import is_time
from paceline.view.files.run_folders import read_object


def write_report(folder: Path, run: str, status: str, reason: str) -> None:
    """An existing report is not replaced."""
    if (folder / "report.json").exists():
        return
    saved = read_object(folder / "captain.json") or {}
    generation, progress = 0, dict[str, Any]()
    with suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError):  # damaged notes
        generation, progress = _progress(saved["captain"])
    started = saved.get("started")
    report = {
        "run": run, "status": status, "reason": reason, "cause": None, "generations": generation, "restarts": [],
        "steps": 0, "steps_per_s": None, "metrics": {}, "started": started if is_time(started) else stamp(),
        "ended": stamp(), "folder": str(folder), "stacks": {}, **progress,
    }  # fmt: skip
    event = {
        "at": stamp(),
        "event": "run-ended",
        "generation": generation,
        "status": status,
        "reason": reason,
        "cause": None,
    }
    try:
        (folder / ".reserve").unlink(missing_ok=True)
        replace(str(folder / "report.json"), report)
        with os.fdopen(append_to_regular(str(folder / "events.jsonl")), "w") as events:
            events.write(json.dumps(event) + "\n")
    except OSError:
        pass  # disk full; the released lock still shows that the run has ended


def _progress(captain: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The generation, and fields of the report, from the captain's notes."""
    awaited = captain.get("awaited", ())  # restarts that no generation has followed
    followed = [record for number, record in enumerate(captain["restarts"]) if number not in awaited]
    restarts = [{**record, "at": stamp(record["at"])} for record in followed]
    for record in restarts:
        record.pop("_at", None)  # measured on the captain's own clock
    watch = captain["watch"]
    progress = {"restarts": restarts, "steps": int(watch["steps"]), "metrics": dict(watch["metrics"])}
    return int(captain["generation"]), {**progress, "stacks": dict(captain["stacks"])}
