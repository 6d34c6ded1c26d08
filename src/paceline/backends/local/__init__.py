"""Runs on this machine: hosts are processes, and a small supervisor replaces the ones that die."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.agent import machine
from paceline.agent.journal import replace, stamp
from paceline.backends.ids import new_run
from paceline.backends.local import control
from paceline.backends.local.resources import CannotRun, assign, caveats, interpreter
from paceline.backends.local.supervisor import supervise
from paceline.plan import Plan, to_json
from paceline.view import origin
from paceline.view.runs import alive, runs_folder, taken

__all__ = ["CannotRun", "Running", "caveats", "create", "kill", "page_for", "start", "stop"]


def create(plan: Plan, job_text: str, wanted: str | None = None) -> tuple[str, Path]:
    """A new run with a folder of its own; nothing is started."""
    assign(plan)
    runs = runs_folder()
    try:
        runs.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            run = new_run(plan.name, wanted)
            folder = runs / run
            why = taken(folder) if folder.exists() else origin.taken(plan, run)
            try:
                if not why:
                    folder.mkdir(mode=0o700)
                    break
            except FileExistsError:
                why = taken(folder)
            if wanted:
                raise CannotRun(why)
        for name in ("logs", "snapshots", "tensorboard"):
            (folder / name).mkdir()
        (folder / "plan.json").write_text(to_json(plan))
        (folder / "job.yaml").write_text(job_text)
    except OSError as error:
        raise CannotRun(
            f"cannot make the run's folder in {runs}: {error.strerror}; PACELINE_HOME can name another place"
        ) from None
    return run, folder


@dataclass
class Running:
    """A run that this process started."""

    run: str
    folder: Path
    pid: int
    _pipe: int  # its closing tells the supervisor that this process is gone
    _gone: bool = False

    def stop(self, reason: str) -> bool:
        """Ask the captain: tasks get SIGTERM and limits.grace."""
        return control.ask_to_stop(self.folder, reason)

    def kill(self) -> None:
        """End everything at once."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        elif not self._gone:
            kill(self.folder)

    def ended(self, timeout: float) -> bool:
        """Waits until then, or until it ends."""
        if not self._gone:
            self._wait(timeout)
            try:
                pid, _ = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid = self.pid
            self._gone = pid != 0
        return self._gone

    def _wait(self, timeout: float) -> None:
        if self._pipe < 0:
            time.sleep(min(0.1, timeout))
            return
        poll = select.poll()
        poll.register(self._pipe, 0)  # an error, once the supervisor is gone
        if poll.poll(1000 * timeout):
            time.sleep(0.005)


def start(plan: Plan, run: str, folder: Path, *, detach: bool, page: str = "") -> Running:
    """Start the run's supervisor, which starts the hosts. Not detached, all of it ends when this process does. `page`:
    host and port for TensorBoard, where there is to be one."""
    from paceline.backends import ahead

    hosts = assign(plan)
    ahead.finish(folder / "tls")
    captain = f"127.0.0.1:{machine.free_port()}"
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    ours, theirs = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(theirs)
        supervise(plan, run, folder, captain, hosts, interpreter(), -1 if detach else ours, page)
    os.close(ours)
    os.close(lock)
    words = {"run": run, "job": plan.name, "framework": plan.framework, "strategy": plan.strategy, "started": stamp()}
    more = {
        "captain": captain,
        "supervisor": pid,
        "machine": platform.node(),
        "detached": detach,
        "version": _version(),
    }
    beside = {"tensorboard": f"http://{page}/"} if page else {}
    replace(str(folder / "run.json"), {**words, **more, **beside})
    if detach:
        os.close(theirs)
        theirs = -1
    return Running(run, folder, pid, theirs)


def page_for(plan: Plan) -> tuple[str, str]:
    """Where TensorBoard is to be beside a run; or nothing, and why not."""
    if not plan.tensorboard:
        return "", ""
    from paceline.agent.showing import with_tensorboard

    python = interpreter()
    if not with_tensorboard([python]):
        return "", f"no TensorBoard beside the run: {python} has no tensorboard (pip install tensorboard)"
    return f"127.0.0.1:{machine.free_port()}", ""


def stop(folder: Path, reason: str, timeout: float) -> bool:
    """Ask the captain of any run to stop, and wait; one whose captain does not answer is ended at once."""
    patience = time.monotonic() + 10  # a captain that starts, or starts again, answers soon
    while not control.ask_to_stop(folder, reason):
        if not alive(folder):
            return True
        if time.monotonic() > patience:
            kill(folder)
            break
        time.sleep(0.1)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not alive(folder):
            return True
        time.sleep(0.05)
    return not alive(folder)


def kill(folder: Path) -> None:
    """End a run at once, through its supervisor."""
    if alive(folder):
        try:
            known = json.loads((folder / "run.json").read_text())
            if known["machine"] != platform.node():
                raise CannotRun(f"{folder.name} runs on {known['machine']}: stop it there")
            os.kill(known["supervisor"], signal.SIGTERM)
        except (OSError, ValueError, KeyError):
            pass


def _version() -> str:
    from paceline import __version__

    return __version__
