"""The supervisor of a local run: starts the hosts, replaces dead ones as a cluster would, and cleans up."""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

# The modules of agents, which are forked from here: imported once. Agents that start later have them as well, so that
# they do not mix two versions if Paceline has been upgraded in the meantime.
import paceline.agent.captain_process.process
import paceline.agent.member
import paceline.agent.tensorboard.server  # noqa: F401
from paceline.agent import __main__ as agent
from paceline.agent import os_processes
from paceline.agent.captain.ledger import HALTING, PAUSED, SAVING
from paceline.agent.net.loop import Loop
from paceline.agent.options import FAILED, SHARED_FOLDER, Options, endpoint
from paceline.backends.local.host_shares import Share
from paceline.backends.local.lost_captain_report import write_report
from paceline.plan import CAPTAIN, TENSORBOARD, Plan, with_absolute_paths
from paceline.storage.json_values import read_json
from paceline.view.files.run_folders import home

RUN_ENDED = (0, FAILED)  # exit codes of a captain that has ended the run
PATIENCE = 5.0  # seconds for members to exit after the captain
TENSORBOARD_RESTART_S = 5.0  # seconds until TensorBoard's agent is replaced: nothing depends on it
RECORDED_WITHIN_S = 60.0  # seconds to write run.json, on a slow disk
MAX_REPLACEMENTS = 20  # crashes of one host within a minute


def supervise(
    plan: Plan,
    run: str,
    folder: Path,
    captain: str,
    shares: Mapping[str, Share],
    interpreter: str,
    pipe: int,
    recorded: int,
    page: str = "",
    metrics: str = "",
) -> NoReturn:
    """Runs in its own process (forked, or started by detached_start.py) and never returns. `recorded`: a pipe that is
    readable or closed once run.json is written, or never will be. `page`, `metrics`: the addresses on which TensorBoard
    listens, and on which the captain serves metrics; empty: not at all."""
    code = 70
    try:
        os.setsid()
        if not is_recorded(folder, recorded):
            os._exit(0)  # nothing has started, and nobody could stop it
        os.environ.update(with_absolute_paths(os.environ))  # agents and tasks run in other folders
        _redirect_output(folder)
        os_processes.become_subreaper()
        code = Supervisor(plan, run, folder, captain, shares, interpreter, pipe, page, metrics).run()
    except BaseException:
        import traceback

        traceback.print_exc()
        _end_children(set())
        write_report(folder, run, "failed", "the supervisor crashed: see agents.log in the run's folder")
    finally:
        try:
            sys.stderr.flush()
        finally:
            os._exit(code)


def is_recorded(folder: Path, recorded: int) -> bool:
    """Whether the run has its run.json, by which others find its supervisor; waits until the process that starts the
    run has written it or has given up. That process decides by the same file whether there is a run."""
    poll = select.poll()
    poll.register(recorded, select.POLLIN)
    poll.poll(1000 * RECORDED_WITHIN_S)
    os.close(recorded)
    return (folder / "run.json").exists()


class Supervisor:
    def __init__(
        self,
        plan: Plan,
        run: str,
        folder: Path,
        captain: str,
        shares: Mapping[str, Share],
        interpreter: str,
        pipe: int,
        page: str,
        metrics: str,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._run = run
        self._options = {
            CAPTAIN: Options(
                run,
                CAPTAIN,
                str(folder / "plan.json"),
                str(folder),
                str(folder / "tls"),
                captain,
                token=os.urandom(8).hex(),
                starter=os.getpid(),
                metrics=metrics,
            )
        }
        hosts_here = {name: share.devices for name, share in shares.items()}
        for name, share in shares.items():
            self._options[name] = Options(
                run, name, str(folder / "plan.json"), str(folder), str(folder / "tls"), captain,
                interpreter=interpreter, cores=share.cores, devices=share.devices, replaces=True,
                starter=os.getpid(), ingest=_claim(plan), machine=hosts_here, peers=SHARED_FOLDER,
                compiled=str(home() / "compiled"),
            )  # fmt: skip
        if page:
            self._options[TENSORBOARD] = Options(
                run, TENSORBOARD, str(folder / "plan.json"), str(folder), str(folder / "tls"), "", listen=page,
                interpreter=interpreter, starter=os.getpid(),
            )  # fmt: skip
        self._pids: dict[int, str] = {}
        self._replaced: dict[str, list[float]] = {}
        self._has_ended = False
        self._loop = Loop()
        self._loop.on_child(self._child_ended)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # `paceline run` handles it; a detached run outlives it
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.on_signal(number, lambda: self._end("stopped", "the supervisor received a signal to stop"))
        self._loop.on_signal(signal.SIGUSR1, self._start_wanted)  # from `scale` and `resume`
        if pipe >= 0:
            self._loop.watch(pipe, selectors.EVENT_READ, self._client_ended)
        later = {host.name for host in plan.hosts} - {host.name for host in plan.first_hosts}
        for name in self._options:
            if name not in later:
                self._start(name)

    def run(self) -> int:
        self._loop.run()
        _end_children(set())
        return 0

    def _start(self, host: str) -> None:
        if self._has_ended or host in self._pids.values():
            return
        if host not in (CAPTAIN, TENSORBOARD) and _stage_of_pause(_notes_of(self._folder)) == PAUSED:
            return  # it has crashed while it was to leave
        pid = os.fork()  # forked, not started: this process has already imported an agent's modules
        if pid == 0:
            _run_agent(self._options[host])
        self._pids[pid] = host

    def _child_ended(self, pid: int, status: int) -> None:
        host = self._pids.pop(pid, None)
        if host is None:
            return
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1
        _end_children(set(self._pids))  # tasks of a killed host
        if host == CAPTAIN and code in RUN_ENDED:
            self._has_ended = True
            self._loop.after(PATIENCE, self._loop.stop)
            for other, name in self._pids.items():
                if name == TENSORBOARD:  # not a member: the captain does not tell it to end
                    os.kill(other, signal.SIGUSR1)
        elif not self._has_ended and code != 0:
            self._replace(host)
        elif not self._has_ended:
            self._start_wanted()  # it may have been requested again while it was leaving
        if self._has_ended and not self._pids:
            self._loop.stop()

    def _replace(self, host: str) -> None:
        if host == TENSORBOARD:
            self._loop.after(TENSORBOARD_RESTART_S, lambda: self._start(host))
            return
        now = time.monotonic()
        times = self._replaced[host] = [at for at in self._replaced.get(host, []) if at > now - 60] + [now]
        if len(times) > MAX_REPLACEMENTS:
            self._end("failed", why_it_crashes(self._options[host]))
            return
        self._loop.after(0.0 if len(times) < 5 else 0.5, lambda: self._start(host))

    def _start_wanted(self) -> None:
        """Start hosts that `scale` or `resume` has requested and that do not run."""
        for host in _requested_hosts(self._plan, self._folder):
            if host in self._options:
                self._start(host)

    def _client_ended(self) -> None:
        self._end("stopped", "killed immediately: `paceline run` ended, or requested it")

    def _end(self, status: str, reason: str) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._end_hosts()
        write_report(self._folder, self._run, status, reason)
        self._loop.stop()

    def _end_hosts(self) -> None:
        """Each host ends its own tasks, even if this process is killed now. Hosts that remain are killed."""
        for pid in self._pids:
            os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + PATIENCE
        while self._pids and time.monotonic() < deadline:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            self._pids.pop(pid, None)
            if pid == 0:
                time.sleep(0.01)
        _end_children(set())


def why_it_crashes(options: Options) -> str:
    """The reason for the user, after the agent of this host has ended."""
    if options.host == CAPTAIN:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the captain does
            try:
                probe.bind(endpoint(options.captain))
            except OSError as error:
                problem = f"the captain cannot listen on {options.captain}: {error.strerror}"
                return f"{problem}; another program may use this port: start the run again"
    return f"the agent of {options.host} keeps crashing: see agents.log in the run's folder"


def _run_agent(options: Options) -> NoReturn:
    code = 70
    try:
        os_processes.name_process(options.host)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        os.closerange(3, max(int(fd.name) for fd in Path("/dev/fd").iterdir()) + 1)  # above all the lock
        code = agent.main(options)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _end_children(hosts: set[int]) -> None:
    """Kill every process below this one except the hosts. Orphans become children of this process, so that the next
    pass finds them."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        strays = [pid for pid in os_processes.children(os.getpid()) if pid not in hosts]
        for pid in strays:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)  # a process stuck in the kernel must not block this one
            except (ProcessLookupError, ChildProcessError):
                pass
        if not strays:
            return
        time.sleep(0.005)


def _requested_hosts(plan: Plan, folder: Path) -> list[str]:
    """The hosts that the captain wants, read from its notes, which it saves before it replies to a request. For a run
    that was never paused: only hosts of scalable roles. Empty if the run is paused or ending, or if the notes cannot be
    read."""
    notes = _notes_of(folder)
    try:
        sizes = {role: int(count) for role, count in notes["books"].get("sizes", {}).items()}
        has_outcome = bool(notes["outcome"][0])
    except (ValueError, LookupError, TypeError, AttributeError):
        return []
    if has_outcome or _stage_of_pause(notes) in (SAVING, HALTING, PAUSED):
        return []
    return [host.name for host in plan.hosts_of_size(sizes) if host.role in sizes or "pause" in notes]


def _notes_of(folder: Path) -> dict[str, Any]:
    """{}: there are none, or they cannot be read."""
    try:
        notes = read_json(str(folder / "captain.json"))["captain"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _stage_of_pause(notes: dict[str, Any]) -> str:
    pause = notes.get("pause")
    return str(pause.get("stage")) if isinstance(pause, dict) else ""


def _claim(plan: Plan) -> str:
    """The folder that replaces a volume claim on this machine, shared by all runs; empty: the job has no claim."""
    name, path = ("", "") if plan.ingest is None else plan.ingest.claimed
    return str(home() / "claims" / name / path) if name else ""


def _redirect_output(folder: Path) -> None:
    """Detach from the terminal: output of agents and supervisor goes to agents.log."""
    log = os.open(folder / "agents.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
