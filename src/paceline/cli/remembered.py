"""A job file that has not changed since it was last found right gives the same plan: it need not be checked again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import plan
from paceline.agent.command import understand

if TYPE_CHECKING:
    from paceline.job import Loaded

MOST = 200  # plans kept
LARGEST = 1_000_000  # bytes of a file


@dataclass(frozen=True)
class Planned:
    plan: plan.Plan
    text: str
    notes: tuple[str, ...]


def plan_of_file(path: Path, overrides: Sequence[str]) -> Planned:
    """The plan of a job file: remembered, or made by loading it, which takes most of a start otherwise."""
    from paceline import job

    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return plan_of(job.load(path, overrides))  # a pipe can be read once; the rest is for it to refuse
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return plan_of(job.load(path, overrides))  # which says what is wrong
    place = _place() / f"{_key(text, path, overrides)}.json"
    found = _read(place)
    if found is not None and _still_there(found.plan):
        return found
    made = plan_of(job.load(path, overrides))
    _write(place, made)
    return made


def plan_of(loaded: Loaded) -> Planned:
    return Planned(plan.make(loaded.job), loaded.text, tuple(loaded.notes))


def _place() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paceline" / "plans"


def _key(text: str, path: Path, overrides: Sequence[str]) -> str:
    """Everything that decides about the plan, this code included."""
    package = Path(plan.__file__).parent
    files = [package / "plan.py", *sorted((package / "job").glob("*.py"))]
    code = [(file.name, file.stat().st_mtime_ns) for file in files]
    decisive = [text, str(path.absolute()), list(overrides), code]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()


def _still_there(made: plan.Plan) -> bool:
    """Files and commands can go without a change of the job; loading then says so."""
    if not Path(made.code).is_dir():
        return False
    commands = [role.command for role in made.roles] + [program.command for program in made.programs.values()]
    commands += [] if made.ingest is None else [made.ingest.command]
    for command in commands:
        if not command:
            continue
        python = understand(command, "python", cwd=made.code)
        if python is None:
            if shutil.which(command[0]) is None and not Path(made.code, command[0]).is_file():
                return False
        elif python.kind == "script" and not Path(made.code, python.target).exists():
            return False
    return True


def _read(path: Path) -> Planned | None:
    try:
        data = json.loads(path.read_text())
        return Planned(plan.from_data(data["plan"]), data["text"], tuple(data["notes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, made: Planned) -> None:
    beside = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside.write_text(json.dumps({"plan": plan.to_data(made.plan), "text": made.text, "notes": made.notes}))
        beside.replace(path)
        kept = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
        for old in kept[MOST:]:
            old.unlink()
    except OSError:
        pass  # a cache that cannot be written only costs time
