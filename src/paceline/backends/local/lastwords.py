"""The report of a run whose captain could not write one: from the notes it kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.agent.journal import replace, stamp


def write_last_words(folder: Path, run: str, status: str, reason: str) -> None:
    """Leaves a report that is there already alone."""
    if (folder / "report.json").exists():
        return
    notes: dict[str, Any] = {}
    try:
        notes = json.loads((folder / "captain.json").read_text())
    except (OSError, ValueError):
        pass
    captain = notes.get("captain") or {}
    watch = captain.get("watch") or {}
    restarts = [{**record, "at": stamp(record["at"])} for record in captain.get("restarts", [])]
    for record in restarts:
        record.pop("_at", None)  # on a clock of the captain's own
    generation = captain.get("generation", 0)
    report = {
        "run": run, "status": status, "reason": reason, "cause": None, "generations": generation, "restarts": restarts,
        "steps": watch.get("steps", 0), "steps_per_s": None, "metrics": watch.get("metrics", {}),
        "started": notes.get("started") or stamp(), "ended": stamp(), "folder": str(folder),
        "stacks": captain.get("stacks", {}),
    }  # fmt: skip
    line = {
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
            events.write(json.dumps(line) + "\n")
    except OSError:
        pass  # a full disk: the lock that is free says enough
