"""Keeps TensorBoard running on a folder: restarts it when it ends, when it uses too much memory, and when files become
shorter, because it never drops data that it has read.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from typing import Callable

from paceline.agent import os_processes
from paceline.agent.net.loop import Loop
from paceline.agent.options import Options, endpoint
from paceline.frameworks.python_start import code_command
from paceline.plan import TENSORBOARD
from paceline.storage.tensorboard_event_files import FileStamps, event_files, last_cut

MIN_DELAY_S, MAX_DELAY_S = 1.0, 30.0  # seconds between two starts
STEADY_S = 60.0  # once it has run that long, the delay is reset
PROBE_S = 60.0  # time limit for an interpreter on a busy machine to start
CHECK_S = 3.0
NICE = 10  # training goes first
MEMORY = 1 << 30
# If TensorFlow is installed, TensorBoard imports it, which takes 0.7 GiB and many seconds, only to read checkpoints in
# its projector. Defining this module prevents that.
LIGHT = (
    "import sys, types; sys.modules['tensorboard.compat.notf'] = types.ModuleType('notf'); "
    "sys.argv[0] = 'tensorboard'; from tensorboard.main import run_main; run_main()"
)
NOT_INSTALLED = "TensorBoard is not installed"  # a pod's message that begins with this text makes clients stop waiting
_PROBE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tensorboard') is None)"


class TensorBoardServer:
    def __init__(
        self, loop: Loop, python: str, folder: str, address: tuple[str, int], memory: int | None,
        report: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`memory`: limit in bytes, including child processes; None: no limit. `report`: is called with the cause of
        each restart that is a problem."""
        self._loop, self._folder, self._report = loop, folder, report
        host, port = address
        options = ["--logdir", folder, "--host", host, "--port", str(port), "--reload_interval", "5"]
        self._command = code_command(python, LIGHT, *options)
        self._memory = memory
        self._files: FileStamps = {}
        self._cut = 0
        self._pid = 0
        self._started = 0.0
        self._delay = MIN_DELAY_S
        self._is_stale = False  # killed to read the files again
        self._problem = ""  # why it was killed
        self._is_closed = False
        loop.on_child(self._child_ended)
        self._start()
        loop.after(CHECK_S, self._check)

    def _start(self) -> None:
        if self._is_closed:
            return
        self._started, self._is_stale, self._problem = self._loop.now(), False, ""
        self._files, self._cut = event_files(self._folder), last_cut(self._folder)
        self._pid = os.posix_spawn(self._command[0], self._command, os.environ, setpgroup=0)

    def _child_ended(self, pid: int, status: int) -> None:
        if pid != self._pid:
            return  # one of its child processes
        self._kill()  # its data server outlives it for a while
        self._pid = 0
        if self._is_closed:
            return
        if self._is_stale:
            self._loop.after(0.0, self._start)
            return
        self._delay = MIN_DELAY_S if self._loop.now() - self._started > STEADY_S else min(MAX_DELAY_S, 2 * self._delay)
        exit = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        self._report(self._problem or exit)
        self._loop.after(self._delay, self._start)

    def _check(self) -> None:
        if self._is_closed:
            return
        self._loop.after(CHECK_S, self._check)
        if not self._pid or self._is_stale or self._problem:
            return
        before, self._files = self._files, event_files(self._folder)
        pairs = [(old, self._files.get(path, (0, 0))) for path, old in before.items()]
        has_shrunk = any(old[0] != new[0] or new[1] < old[1] for old, new in pairs)
        if has_shrunk or last_cut(self._folder) != self._cut:  # a file created since the last check may be cut already
            self._is_stale = True
            self._kill()
        elif self._memory is not None and self._memory_used() > self._memory:
            self._problem = f"it used more memory than tensorboard.memory allows, {self._memory >> 20} MiB"
            self._kill()

    def _memory_used(self) -> int:
        return sum(map(os_processes.resident, (self._pid, *os_processes.descendants(self._pid))))

    def _kill(self) -> None:
        """It has nothing to save."""
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def close(self) -> None:
        self._is_closed = True
        if self._pid:
            self._kill()


def main(options: Options, beat: Callable[[Loop], None]) -> int:
    """TensorBoard of a run on this machine; ends with the run."""
    with open(options.plan) as file:
        memory = json.load(file)["tensorboard"].get("memory")
    os.nice(NICE)
    loop = Loop()

    def report(problem: str) -> None:
        print(f"TensorBoard ended ({problem}) and is being restarted", flush=True)

    folder = f"{options.folder}/{TENSORBOARD}"
    server = TensorBoardServer(loop, options.interpreter, folder, endpoint(options.listen), memory or MEMORY, report)
    loop.on_signal(signal.SIGTERM, loop.stop)
    beat(loop)
    loop.run()
    server.close()
    return 0


def with_tensorboard(names: Iterable[str]) -> str:
    """The first of these interpreters that has TensorBoard installed; empty: none. An image may have a Python that is
    not on its PATH."""
    for path in dict.fromkeys(filter(None, map(shutil.which, filter(None, names)))):
        try:
            if not subprocess.run(code_command(path, _PROBE), stdin=subprocess.DEVNULL, timeout=PROBE_S).returncode:
                return path
        except (OSError, subprocess.TimeoutExpired):
            continue
    return ""
