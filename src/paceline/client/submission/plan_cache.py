"""Caches plans: an unchanged job file that was valid before need not be validated again."""

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
from paceline.agent.tasks.python_command import active_interpreter, parse_command, with_program_found
from paceline.job.planning import make_plan
from paceline.view.files.plan_files import plan_of as plan_of_data
from paceline.view.files.run_files import DamagedRun, NewerRun, parse_json

if TYPE_CHECKING:
    from paceline.job import LoadedJob

MAX_PLANS = 200
MAX_JOB_FILE = 1_000_000  # bytes; larger job files are not cached


@dataclass(frozen=True)
class Planned:
    plan: plan.Plan
    text: str
    notes: tuple[str, ...]


def plan_of_file(path: Path, overrides: Sequence[str]) -> Planned:
    """The plan of a job file, from the cache if possible: loading takes most of the time to start a run."""
    from paceline import job

    try:
        if not path.is_file() or path.stat().st_size > MAX_JOB_FILE:
            return plan_of(job.load(path, overrides))  # a pipe can be read only once; load() rejects anything else
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return plan_of(job.load(path, overrides))  # load() reports what is wrong
    try:
        cache_file = _cache_folder() / f"{_key(text, path, overrides)}.json"
    except RuntimeError:  # this user has no home folder, and so no cache
        return plan_of(job.load(path, overrides))
    cached = _read(cache_file)
    if cached is not None and _is_still_valid(cached.plan):
        return cached
    planned = plan_of(job.load(path, overrides))
    _write(cache_file, planned)
    return planned


def plan_of(loaded: LoadedJob) -> Planned:
    return Planned(make_plan(loaded.job), loaded.text, tuple(loaded.notes))


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paceline" / "plans"


def _key(text: str, path: Path, overrides: Sequence[str]) -> str:
    """A digest of everything that determines the plan, including this code."""
    package = Path(plan.__file__).parent
    files = [package / "plan.py", *sorted((package / "job").glob("*.py"))]
    code = [(file.name, file.stat().st_mtime_ns) for file in files]
    inputs = [text, str(path.absolute()), list(overrides), code]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _is_still_valid(cached: plan.Plan) -> bool:
    """Whether its code folder and programs still exist; if not, loading the job reports it."""
    if not Path(cached.code).is_dir():
        return False
    commands = [role.command for role in cached.roles] + [program.command for program in cached.programs.values()]
    commands += [] if cached.ingest is None else [cached.ingest.command]
    for command in commands:
        if not command:
            continue
        python = parse_command(command, "python", cwd=cached.code)
        if python is None:
            program = with_program_found(command, active_interpreter())[0]
            if shutil.which(program) is None and not Path(cached.code, command[0]).is_file():
                return False
        elif python.kind == "script" and not Path(cached.code, python.target).exists():
            return False
    return True


def _read(path: Path) -> Planned | None:
    """None unless this user has written it, for this key: others may be able to write to the folder, and a plan
    contains the commands that are run."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            data = parse_json(file.read()) if os.fstat(file.fileno()).st_uid == os.geteuid() else None
        if not isinstance(data, dict) or data.get("key") != path.stem:
            return None
        if not isinstance(data.get("text"), str) or not isinstance(data.get("notes"), list):
            return None
        return Planned(plan_of_data(data.get("plan")), data["text"], tuple(map(str, data["notes"])))
    except (OSError, ValueError, DamagedRun, NewerRun):
        return None  # the job file is loaded instead


def _write(path: Path, planned: Planned) -> None:
    partial = path.with_suffix(f".{os.urandom(8).hex()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fields = {"plan": plan.to_data(planned.plan), "text": planned.text, "notes": planned.notes}
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(json.dumps({"key": path.stem, **fields}))
        partial.replace(path)
        newest_first = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
        for old in newest_first[MAX_PLANS:]:
            old.unlink()
    except OSError:
        pass  # a cache that cannot be written only costs time
