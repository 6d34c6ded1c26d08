"""Runs on this machine: hosts are processes, and a small supervisor replaces those that die."""

from __future__ import annotations

import fcntl
import os
import platform
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.agent import free_ports
from paceline.agent.options import METRICS_PATH, endpoint
from paceline.agent.run_files import replace
from paceline.backends import snapshot_origin
from paceline.backends.local import stop_request
from paceline.backends.local.host_shares import (
    CannotRun,
    assign,
    caveats,
    check_addresses,
    check_loopback,
    check_path,
    fitting,
    interpreter,
)
from paceline.backends.local.supervisor import supervise
from paceline.backends.new_run_ids import new_run, run_identity
from paceline.errors import PacelineError
from paceline.plan import Plan, to_json
from paceline.view.files import run_files
from paceline.view.files.run_folders import alive, runs_folder, taken

__all__ = ["CannotRun", "Running", "caveats", "create", "kill", "page_for", "start", "start_detached", "stop"]


def create(plan: Plan, job_text: str, requested: str | None = None) -> tuple[str, Path]:
    """Create the folder of a new run, without starting it. `requested`: its id; default: a generated one."""
    plan = fitting(plan, assign(plan))
    check_loopback()
    check_addresses(plan)
    runs = runs_folder()
    check_path(runs)
    created: Path | None = None
    try:
        runs.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            run = new_run(plan.name, requested)
            folder = runs / run
            conflict: PacelineError | None = taken(folder) if folder.exists() else snapshot_origin.taken(plan, run)
            try:
                if not conflict:
                    folder.mkdir(mode=0o700)
                    created = folder
                    break
            except FileExistsError:
                conflict = taken(folder)
            if requested:
                raise CannotRun(conflict.what, remedy=conflict.remedy_text)
        for name in ("logs", "snapshots", "tensorboard"):
            (folder / name).mkdir()
        (folder / "plan.json").write_text(to_json(plan))
        (folder / "job.yaml").write_text(job_text)
    except OSError as error:
        if created is not None:
            shutil.rmtree(created, ignore_errors=True)
        raise CannotRun(
            f"cannot create the run's folder in {runs}: {error.strerror}", remedy="set PACELINE_HOME to another folder"
        ) from None
    return run, folder


@dataclass
class Running:
    """A run that this process started."""

    run: str
    folder: Path
    pid: int
    _pipe: int  # closing it tells the supervisor that this process has ended
    _has_ended: bool = False

    def stop(self, reason: str, interrupt: bool = False) -> bool:
        """Ask the captain: tasks get SIGTERM and limits.grace. `interrupt`: they get SIGINT first."""
        return stop_request.ask_to_stop(self.folder, reason, interrupt=interrupt)

    def kill(self) -> None:
        """Kill everything immediately."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        elif not self._has_ended:
            kill(self.folder)

    def ended(self, timeout: float) -> bool:
        """Whether the run has ended; waits up to `timeout` seconds for it."""
        if not self._has_ended:
            self._wait(timeout)
            try:
                pid, _ = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid = self.pid
            self._has_ended = pid != 0
        return self._has_ended

    def _wait(self, timeout: float) -> None:
        if self._pipe < 0:
            time.sleep(min(0.1, timeout))
            return
        poll = select.poll()
        poll.register(self._pipe, 0)  # reports an error once the supervisor has ended
        if poll.poll(1000 * timeout):
            time.sleep(0.005)


def start(plan: Plan, run: str, folder: Path, *, detach: bool, page: str = "") -> Running:
    """Start the run's supervisor, which starts the hosts. Unless detached, the run ends with this process. `page`: host
    and port for TensorBoard; empty: no TensorBoard. Forks, which is fast: this process must not have threads."""
    hosts = assign(plan)
    plan = fitting(plan, hosts)
    with _removed_unless_recorded(folder), ExitStack() as descriptors:
        captain, metrics, *_ = _prepare(plan, folder, page, descriptors)  # the supervisor inherits the descriptors
        recorded, announce = _pipe(descriptors)
        read_end, write_end = os.pipe()
        descriptors.callback(os.close, read_end)
        sys.stdout.flush()
        sys.stderr.flush()
        with ExitStack() as unless_started:
            unless_started.callback(os.close, write_end)  # tells the supervisor that this process has ended
            pid = os.fork()
            if pid == 0:
                os.close(write_end)
                os.close(announce)
                pipe = -1 if detach else read_end
                supervise(plan, run, folder, captain, hosts, interpreter(), pipe, recorded, page, metrics)
            _write_info(plan, run, folder, captain, pid, detach, page, metrics)
            os.write(announce, b"1")
            unless_started.pop_all()
    if detach:
        os.close(write_end)
        write_end = -1
    return Running(run, folder, pid, write_end)


def start_detached(plan: Plan, run: str, folder: Path, page: str = "") -> None:
    """Like `start`, for a process that may have threads: the supervisor is started by `python -m`. The run does not end
    with this process. An interrupt at any time leaves a run that can be stopped, or none."""
    from paceline.backends.local.detached_start import start_supervisor

    hosts = assign(plan)
    plan = fitting(plan, hosts)
    with _removed_unless_recorded(folder), ExitStack() as descriptors:
        captain, metrics, lock, ports = _prepare(plan, folder, page, descriptors)
        recorded, announce = _pipe(descriptors)
        pid = start_supervisor(plan, run, folder, captain, hosts, interpreter(), lock, recorded, page, metrics, ports)
        _write_info(plan, run, folder, captain, pid, True, page, metrics)
        os.write(announce, b"1")  # closing it might not be enough: another thread may have forked in the meantime


@contextmanager
def _removed_unless_recorded(folder: Path) -> Iterator[None]:
    """If starting fails or is interrupted before run.json is written, the supervisor ends by itself, and the folder is
    removed. Afterwards, there is a run."""
    try:
        yield
    except BaseException as error:
        if not (folder / "run.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise CannotRun(f"cannot start the run: {error.strerror or error}") from None
        raise


def _pipe(descriptors: ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        descriptors.callback(os.close, end)
    return ends


def _prepare(plan: Plan, folder: Path, page: str, descriptors: ExitStack) -> tuple[str, str, int, list[int]]:
    """The addresses of the captain and of its metrics, the descriptor that holds the lock of the run, and those that
    reserve its ports: another run must not choose them before its agents listen."""
    from paceline.backends import certificates_ahead

    certificates_ahead.finish(folder / "tls")
    ports = free_ports.PortReservations()
    descriptors.callback(ports.release, ())
    if page:
        ports.add(endpoint(page)[1])
    captain = f"127.0.0.1:{ports.reserve()}"
    metrics = f"127.0.0.1:{ports.reserve()}" if plan.metrics else ""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    descriptors.callback(os.close, lock)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return captain, metrics, lock, ports.descriptors()


def _write_info(
    plan: Plan, run: str, folder: Path, captain: str, pid: int, detach: bool, page: str, metrics: str
) -> None:
    processes = {
        "captain": captain,
        "supervisor": pid,
        "machine": platform.node(),
        "detached": detach,
        "version": _version(),
    }
    pages = {"tensorboard": f"http://{page}/"} if page else {}
    pages |= {"metrics_url": f"http://{metrics}{METRICS_PATH}"} if metrics else {}
    replace(str(folder / "run.json"), {**run_identity(run, plan), **processes, **pages})


def page_for(plan: Plan) -> tuple[str, str]:
    """The address for TensorBoard of a run; or an empty one and why there is none."""
    if not plan.tensorboard:
        return "", ""
    from paceline.agent.tensorboard.server import with_tensorboard

    python = interpreter()
    if not with_tensorboard([python]):
        return "", f"TensorBoard is not started: tensorboard is not installed for {python}"
    return f"127.0.0.1:{free_ports.free_port()}", ""


def stop(folder: Path, reason: str, timeout: float) -> bool:
    """Ask the captain to stop the run, and wait. If it does not respond, kill the run."""
    give_up_at = time.monotonic() + 10  # a captain that is starting will respond soon
    while not stop_request.ask_to_stop(folder, reason):
        if not alive(folder):
            return True
        if time.monotonic() > give_up_at:
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
    """Kill a run immediately, through its supervisor."""
    if alive(folder):
        contents = run_files.info(folder)
        info = contents.fields or {}
        if info.get("machine", platform.node()) != platform.node():
            raise CannotRun(f"{folder.name} is running on {info['machine']}", remedy="stop it there")
        if contents.error is not None and not {"machine", "supervisor"} <= info.keys():
            remedy = f"end the process that has locked {folder / 'lock'}"
            raise run_files.DamagedRun(f"{folder.name} cannot be stopped: {contents.error}", remedy=remedy)
        if "supervisor" in info and "machine" in info:
            with suppress(OSError):
                os.kill(info["supervisor"], signal.SIGTERM)


def _version() -> str:
    from paceline import __version__

    return __version__
