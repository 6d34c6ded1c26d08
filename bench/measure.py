"""Shared by the bench scripts: the same environment for both sides, stamps of steps, tables, cleanup."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PROGRAMS = Path(__file__).resolve().parent / "programs"
PACELINE = [sys.executable, "-m", "paceline.cli"]
_SUBREAPER = 36
_EXCLUDED_VARIABLES = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONDONTWRITEBYTECODE", "PACELINE_")


class MeasurementFailed(Exception):
    """Something did not happen in time, or a process failed."""


@dataclass(frozen=True)
class Stamp:
    """A step that a worker has done, with its time by CLOCK_REALTIME."""

    rank: int
    step: int
    pid: int
    at: float


def options(about: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)


def now() -> float:
    return time.clock_gettime(time.CLOCK_REALTIME)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def machine(*packages: str) -> dict[str, Any]:
    """The machine and the versions of packages, for the result."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = {name: _version(name) for name in packages}
    return {"cores": cores(), "memory_gib": round(memory, 1), "python": platform.python_version(), **versions}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(tasks: int, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The same for both sides: interpreter, threads and GPUs, cached byte code, Paceline from this checkout."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_EXCLUDED_VARIABLES)}
    threads = str(max(1, cores() // tasks))
    return {
        **env,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}",
        "PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, [env.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **(more or {}),
    }


def write_job(
    folder: Path, framework: str, command: Sequence[str], workers: int, gpus: int = 0, code: Path = PROGRAMS,
    **more: object,
) -> Path:  # fmt: skip
    """A job file as a user would write it; JSON is YAML."""
    worker = {"replicas": workers, **({"gpus": gpus} if gpus else {})}
    job = {
        "name": "bench", "framework": framework, "command": list(command), "code": str(code),
        "roles": {"worker": worker}, **more,
    }  # fmt: skip
    if framework == "tensorflow":
        job["strategy"] = "multi-worker"
    path = folder / "job.yaml"
    path.write_text(json.dumps(job, indent=1))
    return path


def spawn(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start in a new session, like Paceline's tasks: if the kernel divides cores by session, no side gets more."""
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            list(command), cwd=folder, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip


def stamps(path: Path) -> list[Stamp]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    split = (line.split() for line in lines)
    return [Stamp(int(rank), int(step), int(pid), float(at)) for rank, step, pid, at in split]


def first_steps(recorded: Iterable[Stamp], excluded: frozenset[int] = frozenset()) -> dict[int, Stamp]:
    """The first step of each rank by a process that is not in `excluded`."""
    first: dict[int, Stamp] = {}
    for stamp in recorded:
        if stamp.pid not in excluded:
            first.setdefault(stamp.rank, stamp)
    return first


def wait_until(check: Callable[[], Any], limit: float, description: str, every: float = 0.02) -> Any:
    deadline = time.monotonic() + limit
    while not (result := check()):
        if time.monotonic() > deadline:
            raise MeasurementFailed(f"{description}: not within {limit:g} s")
        time.sleep(every)
    return result


# ---- processes


@contextmanager
def workspace() -> Iterator[Path]:
    """A folder for all files; at the end it is deleted and every process started from here is killed."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process, so that all are killed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
    try:
        yield folder
    finally:
        kill_all()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def fresh(parent: Path) -> Iterator[Path]:
    """A folder for one measurement; all processes are killed after it."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    except MeasurementFailed:
        show_output(folder)
        raise
    finally:
        kill_all()


def show_output(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (path.name == "output" or path.suffix in (".log", ".jsonl")):
            tail = path.read_text(errors="replace").splitlines()[-15:]
            print(f"--- {path.relative_to(folder)}", *(line[:300] for line in tail), sep="\n", file=sys.stderr)


def descendants(pid: int) -> list[int]:
    pids: list[int] = []
    for child in _children(pid):
        pids += [child, *descendants(child)]
    return pids


def _children(pid: int) -> list[int]:
    pids = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            pids += [int(child) for child in (thread / "children").read_text().split()]
    except OSError:
        pass
    return pids


def kill_all() -> None:
    """Kill all descendants of this process, until none remains."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)
    raise MeasurementFailed("processes that do not end: " + " ".join(map(str, descendants(os.getpid()))))


def cpu_seconds(pid: int) -> float:
    """User and system time of one process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def open_files(pid: int) -> set[str]:
    try:
        return {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return set()


# ---- output


def median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 6) if values else None


def ratio(ours: float | None, theirs: float | None) -> float | None:
    return round(ours / theirs, 4) if ours is not None and theirs else None


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.3f} .. {max(values):.3f}" if values else "-"


def table(title: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[at]) for row in [title, *rows]) for at in range(len(title))]
    for row in [title, ["-" * width for width in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(flush=True)


def say(text: str) -> None:
    print(text, flush=True)


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def finish(result: Mapping[str, Any]) -> None:
    """Print the last line: all results as JSON."""
    print(json.dumps(result), flush=True)
