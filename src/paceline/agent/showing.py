"""Keeps TensorBoard running on a folder: started again when it ends, when it takes too much memory, and when files have
become shorter, since what it has read it never forgets.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from typing import Callable

from paceline.agent import machine
from paceline.agent.loop import Loop
from paceline.agent.options import Options, endpoint
from paceline.plan import TENSORBOARD
from paceline.storage.curves import Found, event_files

SOON_S, LATE_S = 1.0, 30.0  # between two starts
STEADY_S = 60.0  # it has come up well once it has lived that long
ASKED_S = 60.0  # an interpreter on a busy machine
LOOK_S = 1.0  # more often than TensorBoard reads: what came and went in between need not have been read
NICE = 10  # training goes first
MEMORY = 1 << 30
# Next to TensorFlow, TensorBoard imports it: 0.7 GiB and many seconds, for reading checkpoints in its projector. This
# module, if there is one, keeps it from that.
LIGHT = (
    "import sys, types; sys.modules['tensorboard.compat.notf'] = types.ModuleType('notf'); "
    "sys.argv[0] = 'tensorboard'; from tensorboard.main import run_main; run_main()"
)
_ASK = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tensorboard') is None)"


class Showing:
    def __init__(
        self, loop: Loop, python: str, folder: str, address: tuple[str, int], memory: int | None,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`memory`: bytes that it may use, together with what it starts; None: somebody else sees to that. `say`: is
        told why it was started again, unless that is no trouble."""
        self._loop, self._folder, self._say = loop, folder, say
        host, port = address
        words = ["--logdir", folder, "--host", host, "--port", str(port), "--reload_interval", "5"]
        self._command = [python, "-c", LIGHT, *words]
        self._memory = memory
        self._seen: Found = {}
        self._pid = 0
        self._started = 0.0
        self._wait = SOON_S
        self._why = ""  # it was told to end
        self._over = False
        loop.on_child(self._child_ended)
        self._start()
        loop.after(LOOK_S, self._look)

    def _start(self) -> None:
        if self._over:
            return
        self._started, self._why = self._loop.now(), ""
        self._seen = event_files(self._folder)
        self._pid = os.posix_spawn(self._command[0], self._command, os.environ, setpgroup=0)

    def _child_ended(self, pid: int, status: int) -> None:
        if pid != self._pid:
            return  # something that it had started
        self._kill()  # its data server outlives it for a while
        self._pid = 0
        if self._over:
            return
        if self._why == "shorter":
            self._loop.after(0.0, self._start)
            return
        self._wait = SOON_S if self._loop.now() - self._started > STEADY_S else min(LATE_S, 2 * self._wait)
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        self._say(self._why or how)
        self._loop.after(self._wait, self._start)

    def _look(self) -> None:
        if self._over:
            return
        self._loop.after(LOOK_S, self._look)
        if not self._pid or self._why:
            return
        before, self._seen = self._seen, event_files(self._folder)
        now = [(self._seen.get(path, (0, 0)), known) for path, known in before.items()]
        if any(found[0] != known[0] or found[1] < known[1] for found, known in now):
            self._end("shorter")
        elif self._memory is not None and self._used() > self._memory:
            self._end(f"it used more than {self._memory >> 20} MiB, which is tensorboard.memory")

    def _used(self) -> int:
        return sum(map(machine.resident, (self._pid, *machine.descendants(self._pid))))

    def _end(self, why: str) -> None:
        self._why = why
        self._kill()

    def _kill(self) -> None:
        """It has nothing to save."""
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def close(self) -> None:
        self._over = True
        if self._pid:
            self._kill()


def main(options: Options, beat: Callable[[Loop], None]) -> int:
    """Beside a run on this machine; ends with it."""
    with open(options.plan) as file:
        memory = json.load(file)["tensorboard"].get("memory")
    os.nice(NICE)
    loop = Loop()

    def say(why: str) -> None:
        print(f"TensorBoard ended ({why}) and is started again", flush=True)

    folder = f"{options.folder}/{TENSORBOARD}"
    showing = Showing(loop, options.interpreter, folder, endpoint(options.listen), memory or MEMORY, say)
    loop.on_signal(signal.SIGTERM, loop.stop)
    beat(loop)
    loop.run()
    showing.close()
    return 0


def with_tensorboard(names: Iterable[str]) -> str:
    """The first of these interpreters that has TensorBoard; empty: none. An image's own Python may not be the one on
    its PATH."""
    for path in dict.fromkeys(filter(None, map(shutil.which, filter(None, names)))):
        try:
            if not subprocess.run([path, "-c", _ASK], stdin=subprocess.DEVNULL, timeout=ASKED_S).returncode:
                return path
        except (OSError, subprocess.TimeoutExpired):
            continue
    return ""
