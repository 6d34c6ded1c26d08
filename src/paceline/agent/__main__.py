"""The first process of a host: starts the agent, and restarts it if it crashes."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import Any

if not __package__:
    # After the standard library: this may be site-packages, with backports of standard modules.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from paceline.agent import os_processes
from paceline.agent.options import FAILED, LEAVING, Options, parse

DELIBERATE = (0, FAILED, LEAVING)
SILENCE = 0.7  # fraction of a lease: the tasks of a stuck agent end before the captain assumes that they have
CRASHES = 5  # crashes within a minute; after more, the host exits


def main(options: Options) -> int:
    os_processes.become_subreaper()
    os_processes.die_with_parent(signal.SIGTERM)
    instance = os.urandom(8).hex()
    crashes: list[float] = []
    received: list[int] = []  # signals
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    signal.signal(signal.SIGUSR1, lambda *_: received.append(signal.SIGKILL))  # kill immediately
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command line handles the terminal's Ctrl-C
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    parent = options.starter or os.getppid()
    for number in range(1, 1_000_000):
        beats_read, beats_write = os.pipe()
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            os.close(beats_read)
            _run_agent(options, instance, number, beats_write, os.getppid())
        os.close(beats_write)
        code = _wait(pid, beats_read, wake_read, options.lease, received, parent)
        os.close(beats_read)
        _kill_descendants()
        if code in DELIBERATE or received:
            return code if code in DELIBERATE else LEAVING
        crashes = [at for at in crashes if at > time.monotonic() - 60] + [time.monotonic()]
        if len(crashes) > CRASHES:
            return 70
    return 70


def _wait(pid: int, beats: int, wake: int, lease: float, received: list[int], parent: int) -> int:
    """Waits for the agent to end and returns its exit code. Kills an agent that is silent for SILENCE * lease: it could
    not end its tasks when their lease expires."""
    last_beat = time.monotonic()
    forwarded = False
    while True:
        readable, _, _ = select.select([beats, wake], [], [], min(1.0, lease / 10))
        if wake in readable:
            os.read(wake, 4096)
        if beats in readable:
            last_beat = time.monotonic() if os.read(beats, 4096) else last_beat
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1
        if os.getppid() != parent:
            received.append(signal.SIGKILL)  # the process that started this host has ended
        if signal.SIGKILL in received or time.monotonic() - last_beat > SILENCE * lease:
            os.kill(pid, signal.SIGKILL)
        elif received and not forwarded:
            os.kill(pid, signal.SIGTERM)
            forwarded = True


def _kill_descendants() -> None:
    """Kills all descendants: this process adopts orphans, so when it has no children, all descendants have ended."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for child in os_processes.children(os.getpid()):
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)  # do not block on a process that is stuck in the kernel
        except ChildProcessError:
            return


def _run_agent(options: Options, instance: str, number: int, beats: int, parent: int) -> None:
    code = 1
    try:
        os_processes.die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        os.set_blocking(beats, False)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

        def beat(loop: Any) -> None:
            try:
                os.write(beats, b".")
            except OSError:
                pass
            loop.after(options.lease / 10, lambda: beat(loop))

        if options.host == "captain":
            from paceline.agent.captain_process import process

            code = process.main(options, beat)
        elif options.host == "tensorboard" and options.captain:
            from paceline.agent.tensorboard import pod_agent

            code = pod_agent.main(options, beat)
        elif options.host == "tensorboard":
            from paceline.agent.tensorboard import server

            code = server.main(options, beat)
        else:
            from paceline.agent import member

            os_processes.become_subreaper()  # it adopts tasks forked by a spare, and orphans of tasks
            code = member.main(options, instance, number, beat)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
        finally:  # even if the disk is full
            os._exit(code)


if __name__ == "__main__":
    sys.exit(main(parse(sys.argv[1])))
