"""For soak.py: a real run on this machine, disturbed all the time, and what its processes and files take."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measure

sys.path.insert(0, str(measure.ROOT / "tests"))

from support.stores import parts, refusing, servers

RUN = "soak-3f9a"
START_LIMIT = 600.0
STOP_LIMIT = 600.0
SAMPLE_EVERY = 2.0
SAY_EVERY = 60.0
TAIL = 4096  # bytes of the file in which tasks record their steps
STORE_CYCLE = 20.0  # seconds: then it refuses requests for 5 s, and loses them for 3 s
HANG_AFTER = "1h"  # the machine may be busy
RATE = "1Mi"  # of uploads, per second and host
_NUMBERS = re.compile(r"\d+|[0-9a-f]{8,}")


@dataclass(frozen=True)
class Job:
    """A run of its own, beside others."""

    name: str
    framework: str
    command: tuple[str, ...]
    workers: int
    kill_every: float  # seconds between two kills of a random task
    captain_lives: float  # seconds

    def fields(self, store: str) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "name": self.name, "framework": self.framework, "command": list(self.command),
            "code": str(measure.PROGRAMS), "roles": {"worker": {"replicas": self.workers}},
            "snapshots": {"to": store, "rate": RATE, "keep": 3},
            "restart": {"limit": 100, "hang_after": HANG_AFTER},
        }  # fmt: skip
        return fields | ({"strategy": "multi-worker"} if self.framework == "tensorflow" else {})


NEVER = float("inf")
_STATE = ("--gib", "0.01", "--every", "40", "--sleep", "0.05", "--steps", "1000000000")
PLAIN = Job("soak", "none", ("python", "soak_task.py"), 4, kill_every=10.0, captain_lives=60.0)
FRAMEWORKS = (
    Job("soak-tensorflow", "tensorflow", ("python", "tensorflow_state_steps.py", *_STATE), 2, 30.0, NEVER),
    Job("soak-torch", "torch", ("python", "torch_state_steps.py", *_STATE), 2, 30.0, NEVER),
)


@dataclass
class Samples:
    """What was measured, over the time since the start: name -> time and value."""

    values: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=dict)  # by kind and name
    kills: int = 0
    captain_kills: int = 0
    refused: int = 0
    seconds: float = 0.0  # of the real run
    problem: str = ""  # why it ended early
    left: list[str] = field(default_factory=list)  # what remains of the runs after they were stopped
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of their folders then

    def add(self, kind: str, name: str, at: float, value: float) -> None:
        self.values.setdefault((kind, name), []).append((at, value))


class Run:
    """One run that is followed by two clients, and whose tasks and captain are killed."""

    def __init__(self, job: Job, folder: Path, store: str, env: Mapping[str, str]) -> None:
        self.job, self.run = job, f"{job.name}-3f9a"
        self._folder, self._home = folder, folder / "home"
        folder.mkdir()
        (folder / "tmp").mkdir()
        (folder / "job.yaml").write_text(json.dumps(job.fields(store), indent=1))
        self._stamps = folder / "stamps"
        more = {"PACELINE_HOME": str(self._home), "TMPDIR": str(folder / "tmp"), "BENCH_STAMPS": str(self._stamps)}
        self._env = measure.environment(job.workers, {**more, **env})
        self._clients = {"client: run": self._start("run", "job.yaml", "--run", self.run)}
        self._files = self._home / "runs" / self.run
        measure.wait_until(self._has_started, START_LIMIT, f"the start of {job.name}")
        self._clients["client: logs -f"] = self._start("logs", "-f", self.run)
        self._clients["client: events -f"] = self._start("events", "-f", self.run)

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*measure.PACELINE, *arguments], cwd=self._folder, env=self._env, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=(self._folder / "output").open("ab"), start_new_session=True,
        )  # fmt: skip

    def _has_started(self) -> bool:
        self.check()
        return (self._files / "events.jsonl").exists()

    def check(self) -> None:
        ended = [name for name, process in self._clients.items() if process.poll() is not None]
        if ended:
            measure.show_output(self._folder)
            raise measure.MeasurementFailed(f"{self.job.name}: {', '.join(ended)} has ended")

    def stop(self, samples: Samples) -> None:
        """Afterwards, nothing runs any more, and all clients have seen the end."""
        processes = self.processes()
        command = [*measure.PACELINE, "stop", self.run]
        try:
            subprocess.run(
                command, cwd=self._folder, env=self._env, capture_output=True, timeout=STOP_LIMIT, check=True
            )
            for process in self._clients.values():
                process.wait(STOP_LIMIT)
        except subprocess.SubprocessError as error:
            samples.left.append(f"{self.run}: {error}")
        samples.left += [f"{kind} of {self.run}" for pid, kind in processes.items() if _is_running(pid)]
        samples.sizes[self.run] = sum(size for size, _ in _sizes(self._files).values())

    def processes(self) -> dict[int, str]:
        """The processes of this run, with their kinds."""
        supervisor, tasks = json.loads((self._files / "run.json").read_text())["supervisor"], self._task_pids().values()
        kinds = {process.pid: name for name, process in self._clients.items()} | {supervisor: "supervisor"}
        for host in _children(supervisor):
            name = re.sub(r"-\d+$", "", _comm(host))  # captain, worker-host
            kinds[host] = f"{name}: first process"
            for agent in _children(host):
                kinds[agent] = f"{name}: agent"
                for pid in _children(agent):
                    kinds[pid] = f"{name}: {'task' if pid in tasks else _kind(pid)}"
                    kinds |= dict.fromkeys(measure.descendants(pid), f"{name}: task")
        return kinds

    def kill_task(self) -> bool:
        """Only a task that has done a step: on a busy machine, none may be running."""
        running = [pid for pid in self._task_pids().values() if pid in self.processes()]
        return bool(running) and _kill(random.choice(running))

    def _task_pids(self) -> dict[int, int]:
        """By rank, as the tasks have recorded them: those that were forked from spares look like spares."""
        with contextlib.suppress(OSError), self._stamps.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            return {int(line.split()[0]): int(line.split()[2]) for line in file.read().splitlines()[1:]}
        return {}

    def kill_captain(self) -> bool:
        return any(_kill(pid) for pid, kind in self.processes().items() if kind == "captain: agent")

    def sample(self, samples: Samples, at: float) -> None:
        prefix = f"{self.job.name}: "
        by_kind: dict[str, list[tuple[float, float, float]]] = {}
        for pid, kind in self.processes().items():
            with contextlib.suppress(OSError, KeyError, ValueError):
                usage = _usage(pid)
                by_kind.setdefault(kind, []).append(usage)
        for kind, usages in by_kind.items():
            memory, descriptors, threads = zip(*usages, strict=True)
            samples.add("memory", prefix + kind, at, max(memory))
            samples.add("descriptors", prefix + kind, at, max(descriptors))
            samples.add("threads", prefix + kind, at, max(threads))
        samples.add("processes", f"{self.job.name}", at, sum(map(len, by_kind.values())))
        for name, (size, count) in _sizes(self._folder, ("output", "stamps")).items():
            samples.add("bytes", prefix + name.replace(f"home/runs/{_shortened(self.run)}/", ""), at, size)
            samples.add("files", prefix + name.replace(f"home/runs/{_shortened(self.run)}/", ""), at, count)


def soak(
    parent: Path, jobs: tuple[Job, ...], bucket: bool, seconds: float, samples: Samples, say: Callable[[str], None]
) -> None:
    """Returns when the runs were stopped: after `seconds`, or earlier if one has failed or a user interrupts it."""
    with _store(parent, bucket) as (store, env, flapping):
        runs: list[Run] = []
        try:
            runs += [Run(job, parent / job.name, f"{store}/{job.name}", env) for job in jobs]
            flapping.begin()
            _disturb(runs, parent, seconds, samples, say)
        except (measure.MeasurementFailed, KeyboardInterrupt) as error:
            samples.problem = f"{error or 'interrupted'} after {samples.seconds / 60:.1f} min"
        samples.refused = flapping.failed
        for run in runs:
            run.stop(samples)
    own_session = os.getsid(0)  # others of this script are in it, too
    for pid in filter(_is_running, measure.descendants(os.getpid())):
        if os.getsid(pid) != own_session:
            samples.left.append(f"process {pid} ({_comm(pid)})")


def _disturb(runs: list[Run], parent: Path, seconds: float, samples: Samples, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    kill_at = {run.job.name: run.job.kill_every for run in runs}
    captain_at = {run.job.name: run.job.captain_lives for run in runs}
    say_at = 0.0
    while (now := time.monotonic() - began) < seconds:
        samples.seconds = now
        for run in runs:
            run.check()
            if now >= kill_at[run.job.name]:
                kill_at[run.job.name] = now + run.job.kill_every
                samples.kills += run.kill_task()
            if now >= captain_at[run.job.name]:
                captain_at[run.job.name] = now + run.job.captain_lives
                samples.captain_kills += run.kill_captain()
            run.sample(samples, now)
        if (parent / "objects").is_dir():
            for name, (size, count) in _sizes(parent / "objects", (".vgwlocks", ".sgwtmp")).items():
                samples.add("bytes", f"store: {name}", now, size)
                samples.add("files", f"store: {name}", now, count)
        if now >= say_at:
            say_at = now + SAY_EVERY
            say(f"{now / 60:.1f} min: {samples.kills} tasks and {samples.captain_kills} captains killed")
        time.sleep(max(0.0, began + now + SAMPLE_EVERY - time.monotonic()))


class Flapping:
    """Faults of a store: most of the time none, then requests are refused for 5 s, and lost for 3 s."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._lock = threading.Lock()
        self.failed = 0  # requests

    def begin(self) -> None:
        self._began = time.monotonic()

    def __call__(self, _: refusing.Asked) -> refusing.Fault | None:
        phase = 0.0 if self._began is None else (time.monotonic() - self._began) % STORE_CYCLE
        if phase < STORE_CYCLE - 8.0:
            return None
        with self._lock:
            self.failed += 1
        return refusing.Fault(503 if phase < STORE_CYCLE - 3.0 else 0, "no")


@contextlib.contextmanager
def _store(parent: Path, bucket: bool) -> Iterator[tuple[str, dict[str, str], Flapping]]:
    """The address of a bucket, and its settings. Or, also without Go, a folder, which does not fail."""
    flapping = Flapping()
    if not bucket or parts.unmet():
        yield str(parent / "objects"), {}, flapping
        return
    with servers.s3(parent) as server, refusing.proxy(server.port) as proxy, proxy.wrong(flapping):
        yield server.url, server.through(proxy).options, flapping


# ---- processes and files


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _is_running(pid: int) -> bool:
    """Not those that have ended, whether or not their parent knows it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _kind(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "other"
    if b"transfers.porter" in command:
        return "porter"
    return "spare"


def _usage(pid: int) -> tuple[float, float, float]:
    """Bytes of memory that are not shared with files, descriptors, threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory = int(status["RssAnon"].split()[0]) * 1024
    return memory, len(list(Path(f"/proc/{pid}/fd").iterdir())), int(status["Threads"])


def _shortened(path: str) -> str:
    return _NUMBERS.sub("N", path)


def _sizes(folder: Path, excluded: tuple[str, ...] = ()) -> dict[str, tuple[int, int]]:
    """Bytes and number of files, by path with all numbers replaced."""
    sizes: dict[str, tuple[int, int]] = {}
    for parent, folders, names in os.walk(folder):
        if Path(parent) == folder:
            folders[:] = [name for name in folders if name not in excluded]
            names = [name for name in names if name not in excluded]
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(OSError):
                kind = _shortened(str(path.relative_to(folder)))
                size, count = sizes.get(kind, (0, 0))
                sizes[kind] = size + path.lstat().st_size, count + 1
    return sizes
