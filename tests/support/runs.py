"""Runs that tests disturb: a run as a subprocess of the command line, its processes by name, its events and its end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from support.environment import without
from support.event_log import Event, EventLog

SOURCE = Path(__file__).parents[2] / "src"
PROGRAMS = Path(__file__).parents[1] / "programs"
# For programs of TensorFlow: if JAX is installed, TensorFlow imports it, which takes a sixth of the time of its start.
# Because of its name, the folder is taken for one of installed packages.
TENSORFLOW_PATH = f"{SOURCE}{os.pathsep}{Path(__file__).parent / 'without_jax' / 'site-packages'}"
LIMIT_S = 120.0
GONE_S = 60.0  # time limit for the remaining processes of a run to end after it lost its supervisor

Report = dict[str, Any]
T = TypeVar("T")


def eventually(description: str, check: Callable[[], T], limit: float = LIMIT_S, more: Callable[[], str] = str) -> T:
    """The first true result of `check`; after the limit, an AssertionError with the description."""
    until = time.monotonic() + limit
    while True:
        began = time.monotonic()
        result = check()
        if result:
            return result
        now = time.monotonic()
        assert now < until, f"not within {limit:g} s: {description}\n{more()}"
        time.sleep(max(0.02, 4 * (now - began)))  # an expensive check must not slow down what it waits for


def misbehave(*options: object) -> list[str]:
    return ["python", str(PROGRAMS / "misbehave.py"), *map(str, options)]


def orders(framework: str, folder: Path, *options: object) -> list[str]:
    return ["python", str(PROGRAMS / "orders.py"), framework, str(folder), *map(str, options)]


def order(folder: Path, rank: int, how: str, when: str = "order") -> None:
    """Makes a task of orders.py fail this way before its next step, or (`when="start"`) before its first."""
    folder.mkdir(exist_ok=True)
    partial = folder / f"{when}-{rank}.partial"
    partial.write_text(how)
    partial.rename(folder / f"{when}-{rank}")


def steps_done(folder: Path) -> int:
    """The last step that orders.py has done, from its own file."""
    path = folder / "step"
    return int(path.read_text()) if path.exists() else 0


def job(command: Sequence[str] = (), workers: int = 2, **more: Any) -> dict[str, Any]:
    """The fields of a job; `more` adds fields and overrides the defaults."""
    fields = {
        "name": "attack",
        "framework": "none",
        "command": list(command),
        "roles": {"worker": {"replicas": workers}},
    }
    return {**fields, **more}


def processes(home: Path) -> list[psutil.Process]:
    """Every process that belongs to runs of this home, whatever its parent and session are now."""
    matching = []
    variable = b"\0PACELINE_HOME=" + os.fsencode(home) + b"\0"
    for process in (path for path in Path("/proc").iterdir() if path.name.isdigit()):
        with contextlib.suppress(OSError, psutil.Error):  # a zombie has neither environment nor command line
            environment = b"\0" + (process / "environ").read_bytes()
            if variable in environment or os.fsencode(home) in (process / "cmdline").read_bytes():
                matching.append(psutil.Process(int(process.name)))
    return matching


def children(pid: int) -> list[psutil.Process]:
    """The direct children of a process. Unlike psutil, it does not read all processes of the machine."""
    direct = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in path.read_text().split():
                with contextlib.suppress(psutil.Error):
                    direct.append(psutil.Process(int(child)))
    return direct


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end_started_since(before: set[psutil.Process], wait: float = 0.0) -> list[psutil.Process]:
    """Kills the descendants of this process, except children in `before` and their descendants, such as clusters of
    other tests. Returns those that had not ended on their own within `wait` seconds."""
    new = [child for child in psutil.Process().children() if child not in before]
    for child in list(new):
        with contextlib.suppress(psutil.Error):
            new += child.children(recursive=True)
    _, remaining = psutil.wait_procs(new, timeout=wait)
    for process in remaining:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(remaining, timeout=10)
    return remaining


class Run:
    """One run in the foreground (or detached), in a home of its own or a shared one."""

    def __init__(
        self, folder: Path, job: dict[str, Any], *options: str, home: Path | None = None, **popen: Any
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.home = home or folder / "home"
        self.place = folder
        before = self._folders()
        (folder / "job.yaml").write_text(json.dumps(job))
        inherited = without("PACELINE", "PYTEST")
        path = TENSORFLOW_PATH if job.get("framework") == "tensorflow" else str(SOURCE)
        self.env = {**inherited, "PACELINE_HOME": str(self.home), "PYTHONPATH": path, **popen.pop("env", {})}
        command = popen.pop("command", [sys.executable, "-m", "paceline.cli"])
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            self.cli = subprocess.Popen(
                [*command, "run", "job.yaml", "-o", "json", *options], cwd=folder, env=self.env,
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True, **popen,
            )  # fmt: skip
        run_folder: list[Path] = eventually("the run's folder", lambda: self._folders() - before, more=self.said).pop()
        self.folder: Path = run_folder
        self._event_log = EventLog(run_folder / "events.jsonl")

    def _folders(self) -> Any:
        return set((self.home / "runs").iterdir()) if (self.home / "runs").is_dir() else set()

    # ---- its output and events

    def said(self) -> str:
        return (self.place / "stderr").read_text(errors="replace")

    def events(self, *kinds: str) -> list[Event]:
        """The events so far, in order; with `kinds`, only events of these kinds."""
        return [event for event in self._event_log.read() if not kinds or event["event"] in kinds]

    def wait(self, kind: str, limit: float = LIMIT_S, after: int = 0, **fields: Any) -> Event:
        """The first event of that kind with those fields, at or after position `after` among all events."""

        def check() -> Event | None:
            events = self.events()
            for event in events[after:]:
                if event["event"] == kind and all(event.get(name) == value for name, value in fields.items()):
                    return event
            over = bool(events) and events[-1]["event"] == "run-ended"
            assert not over, f"the run has ended without {kind} {fields}\n{self.story()}"
            return None

        event = eventually(f"event {kind} {fields}", check, limit, self.story)
        assert event is not None
        return event

    def wait_for_step(self, limit: float = LIMIT_S, after: int = 0, generation: int = 1, task: str = "") -> Event:
        def check() -> Event | None:
            steps = (event for event in self.events()[after:] if event["event"] == "step")
            matching = (e for e in steps if e["generation"] >= generation and (not task or e["task"] == task))
            return next(matching, None)

        event = eventually(f"a step of generation {generation}", check, limit, self.story)
        assert event is not None
        return event

    def all_step(self, limit: float = LIMIT_S) -> None:
        """Waits until every task has reported a step; before that, its process may not have started."""
        for task in self.wait("run-started", limit)["tasks"]:
            self.wait_for_step(limit, task=task)

    def position(self) -> int:
        return len(self.events())

    def story(self) -> str:
        events = [event for event in self.events() if event["event"] not in ("step", "saved", "committed")][-40:]
        agents = self.folder / "agents.log"
        log = agents.read_text(errors="replace")[-1500:] if agents.exists() else ""
        return "\n".join(
            [*(json.dumps(event)[:300] for event in events), "stderr:", self.said()[-3000:], "agents.log:", log]
        )

    def log(self, task: str) -> str:
        path = self.folder / "logs" / f"{task}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # ---- its processes

    @property
    def supervisor(self) -> int:
        path = self.folder / "run.json"
        return int(json.loads(eventually("run.json", lambda: path.exists() and path.read_text()) or "")["supervisor"])

    def hosts(self) -> list[str]:
        plan = json.loads((self.folder / "plan.json").read_text())
        return [host["name"] for host in plan["hosts"]]

    def keepers(self) -> dict[str, int]:
        """The pid of the first process of each host, including the captain's."""
        pids = {}
        hosts = {name[:15]: name for name in ["captain", *self.hosts()]}
        for process in children(self.supervisor):
            with contextlib.suppress(OSError, KeyError):
                pids[hosts[Path(f"/proc/{process.pid}/comm").read_text().strip()]] = process.pid
        return pids

    def keeper(self, host: str) -> int:
        return eventually(f"a keeper of {host}", lambda: self.keepers().get(host, 0), more=self.story)

    def agent(self, host: str) -> int:
        """The agent itself: a fork of the keeper, with the same command line."""

        def check() -> int:
            with contextlib.suppress(psutil.Error):
                keeper = psutil.Process(self.keepers().get(host, 0) or -1)
                for child in children(keeper.pid):
                    if child.cmdline() == keeper.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                        return child.pid
            return 0

        return eventually(f"an agent of {host}", check, more=self.story)

    def tasks(self) -> dict[str, int]:
        """The pid of the newest attempt of each running task."""
        pids: dict[str, int] = {}
        for event in self.events("task-started", "task-exited"):
            if event["event"] == "task-started":
                pids[event["task"]] = event["pid"]
            else:
                pids.pop(event["task"], None)
        return pids

    def task(self, name: str) -> int:
        return eventually(f"task {name} runs", lambda: self.tasks().get(name, 0), more=self.story)

    def spare(self, host: str) -> int:
        """Waits for the spare of a host and returns its pid."""
        agent = self.agent(host)

        def check() -> int:
            tasks = set(self.tasks().values())
            with contextlib.suppress(psutil.Error):
                for child in children(agent):
                    if child.pid not in tasks and child.environ().get("PACELINE_STARTER", "").startswith("spare"):
                        return child.pid
            return 0

        return eventually(f"a spare on {host}", check, more=self.story)

    def below(self, pid: int) -> set[int]:
        with contextlib.suppress(psutil.Error):
            return {child.pid for child in psutil.Process(pid).children(recursive=True)}
        return set()

    # ---- its end

    def call(
        self, *arguments: str, limit: float = LIMIT_S, input: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "paceline.cli", *arguments], cwd=self.place, env=self.env, capture_output=True,
            text=True, timeout=limit, input=input,
        )  # fmt: skip

    def end(self, limit: float = LIMIT_S) -> tuple[int, Report]:
        """Waits for the command line to end on its own; returns its exit code and the report it printed."""
        try:
            code = self.cli.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run has not ended within {limit:g} s\n{self.story()}") from None
        printed = (self.place / "stdout").read_text()
        assert printed, f"no report\n{self.story()}"
        self.nothing_left()
        report: Report = json.loads(printed)
        return code, report

    def succeeds(self, limit: float = LIMIT_S) -> Report:
        code, report = self.end(limit)
        assert (code, report["status"]) == (0, "succeeded"), f"{report}\n{self.story()}"
        return report

    def fails(self, limit: float = LIMIT_S) -> Report:
        code, report = self.end(limit)
        assert (code, report["status"]) == (1, "failed"), f"{report}\n{self.story()}"
        return report

    def report(self) -> Report:
        """The report of a run whose command line did not stay until the end."""
        path = self.folder / "report.json"
        eventually("the report", path.exists, more=self.story)
        report: Report = json.loads(path.read_text())
        return report

    def left(self) -> list[psutil.Process]:
        """The processes of this run; if it does not share its home, all processes of the home."""
        return [process for process in processes(self.home) if self._mine(process)]

    def _mine(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            env = process.environ()
            if env.get("PACELINE_HOME") != str(self.home):
                return str(self.folder) in " ".join(process.cmdline())
            if env.get("PACELINE_RUN") or not self.shared:
                return env.get("PACELINE_RUN", self.folder.name) == self.folder.name
            output = Path(f"/proc/{process.pid}/fd/2").readlink()  # agents and supervisors write to agents.log
            return output.is_relative_to(self.folder) or str(self.folder) in " ".join(env.values())
        return False

    @property
    def shared(self) -> bool:
        return len(self._folders()) > 1

    def nothing_left(self, limit: float = GONE_S) -> None:
        def describe() -> str:
            return "\n".join(f"{p.pid} {' '.join(p.cmdline())[:200]}" for p in self.left() if p.is_running())

        eventually("no process of the run is left", lambda: not self.left(), limit, describe)

    def clean_up(self) -> None:
        """Kills all processes that the test left running."""
        until = time.monotonic() + GONE_S
        while time.monotonic() < until:
            self.cli.poll()
            remaining = processes(self.home)
            if not remaining:
                break
            for process in remaining:
                kill(process.pid)
            time.sleep(0.02)
        self.cli.poll() is None and self.cli.kill()
        self.cli.wait(LIMIT_S)


@contextlib.contextmanager
def without_host(run: Run, host: str) -> Iterator[None]:
    """The agent of this host and its tasks are dead, and nothing replaces them meanwhile."""
    keeper = run.keeper(host)
    os.kill(keeper, signal.SIGSTOP)
    try:
        os.kill(run.agent(host), signal.SIGKILL)
        yield
    finally:
        os.kill(keeper, signal.SIGCONT)


def last_step(state: Path, ahead: int = 10) -> None:
    """Makes all ranks of orders.py succeed together, `ahead` steps from now."""
    partial = state / "finish.partial"
    partial.write_text(str(steps_done(state) + ahead))
    partial.rename(state / "finish")


def finish(run: Run, state: Path, limit: float = LIMIT_S, ahead: int = 10) -> Report:
    """`ahead`: steps. If all ranks take part in each step, all must read the file before any reaches the last step."""
    last_step(state, ahead)
    return run.succeeds(limit)


TOGETHER = 40  # steps, for `finish`: two seconds


def causes(report: Report) -> list[tuple[str, str]]:
    return [(restart["cause"], restart["task"]) for restart in report["restarts"]]


def recovers(run: Run, after: int, limit: float = LIMIT_S) -> Event:
    """Waits until steps are reported again after the first restart from position `after` on; returns that restart."""
    restart = run.wait("restart", limit, after)
    run.wait("recovered", limit, after)
    return restart


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mounts a small file system over a folder, with the same contents."""
    copy = folder.with_name(folder.name + ".kept")
    shutil.copytree(folder, copy)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)], check=True)
    try:
        shutil.copytree(copy, folder, dirs_exist_ok=True)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    return ballast


def fill_names(folder: Path) -> Path:
    """Uses up all inodes: no file or folder can be created, although there is free space."""
    ballast = folder / "ballast"
    ballast.mkdir()
    with contextlib.suppress(OSError):
        for number in range(10**6):
            (ballast / str(number)).touch()
    return ballast


Starter = Callable[..., Run]


@contextlib.contextmanager
def starter(root: Path) -> Iterator[Starter]:
    """`start(job, *options)` starts a run; all runs are killed when the test is over."""
    runs: list[Run] = []

    def start(job: dict[str, Any], *options: str, home: Path | None = None, **popen: Any) -> Run:
        run = Run(root / f"run-{len(runs)}", job, *options, home=home, **popen)
        runs.append(run)
        return run

    try:
        yield start
    finally:
        for run in runs:
            run.clean_up()
