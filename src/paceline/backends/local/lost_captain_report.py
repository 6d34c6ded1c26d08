"""Writes the report of a run if its captain could not, from the state that the captain saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.agent.run_files import replace, stamp


def write_report(folder: Path, run: str, status: str, reason: str) -> None:
    """An existing report is not replaced."""
    if (folder / "report.json").exists():
        return
    saved: dict[str, Any] = {}
    try:
        saved = json.loads((folder / "captain.json").read_text())
    except (OSError, ValueError):
        pass
    captain = saved.get("captain") or {}
    watch = captain.get("watch") or {}
    restarts = [{**record, "at": stamp(record["at"])} for record in captain.get("restarts", [])]
    for record in restarts:
        record.pop("_at", None)  # measured on the captain's own clock
    generation = captain.get("generation", 0)
    report = {
        "run": run, "status": status, "reason": reason, "cause": None, "generations": generation, "restarts": restarts,
        "steps": watch.get("steps", 0), "steps_per_s": None, "metrics": watch.get("metrics", {}),
        "started": saved.get("started") or stamp(), "ended": stamp(), "folder": str(folder),
        "stacks": captain.get("stacks", {}),
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
        with (folder / "events.jsonl").open("a") as events:
            events.write(json.dumps(event) + "\n")
    except OSError:
        pass  # disk full; the released lock still shows that the run has ended
