"""The first process of a host: a few lines that start the agent, and start it again if it crashes."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from typing import Any

if not __package__:
    # Behind the standard library: this may be site-packages, with backports of its modules.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from paceline.agent import machine
from paceline.agent.options import FAILED, LEAVING, Options, parse

DELIBERATE = (0, FAILED, LEAVING)
SILENCE = 0.7  # of a lease: the tasks of an agent that is stuck are gone before the captain counts on it
CRASHES = 5  # in a minute; then the host is lost


def main(options: Options) -> int:
    machine.become_subreaper()
    machine.die_with_parent(signal.SIGTERM)
    instance = os.urandom(8).hex()
    crashes: list[float] = []
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    signal.signal(signal.SIGUSR1, lambda *_: told.append(signal.SIGKILL))  # end at once
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the command line
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    parent = options.starter or os.getppid()
    for number in range(1, 1_000_000):
        signs, agent_end = os.pipe()
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            os.close(signs)
            _agent(options, instance, number, agent_end, os.getppid())
        os.close(agent_end)
        code = _wait(pid, signs, woken, options.lease, told, parent)
        os.close(signs)
        _end_the_rest()
        if code in DELIBERATE or told:
            return code if code in DELIBERATE else LEAVING
        crashes = [at for at in crashes if at > time.monotonic() - 60] + [time.monotonic()]
        if len(crashes) > CRASHES:
            return 70
    return 70


def _wait(pid: int, signs: int, woken: int, lease: float, told: list[int], parent: int) -> int:
    """Until the agent ends. One that gives no sign of life for a lease can no longer keep its tasks to their lease."""
    heard = time.monotonic()
    forwarded = False
    while True:
        readable, _, _ = select.select([signs, woken], [], [], min(1.0, lease / 10))
        if woken in readable:
            os.read(woken, 4096)
        if signs in readable:
            heard = time.monotonic() if os.read(signs, 4096) else heard
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1
        if os.getppid() != parent:
            told.append(signal.SIGKILL)  # whoever started this host is gone
        if signal.SIGKILL in told or time.monotonic() - heard > SILENCE * lease:
            os.kill(pid, signal.SIGKILL)
        elif told and not forwarded:
            os.kill(pid, signal.SIGTERM)
            forwarded = True


def _end_the_rest() -> None:
    """Everything below this process: it adopts orphans, so this ends when none is left."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for child in machine.children(os.getpid()):
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)  # one that the kernel holds must not hold this process
        except ChildProcessError:
            return


def _agent(options: Options, instance: str, number: int, signs: int, keeper: int) -> None:
    code = 1
    try:
        machine.die_with_parent()
        if os.getppid() != keeper:
            os._exit(1)
        os.set_blocking(signs, False)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

        def beat(loop: Any) -> None:
            try:
                os.write(signs, b".")
            except OSError:
                pass
            loop.after(options.lease / 10, lambda: beat(loop))

        if options.host == "captain":
            from paceline.agent import captaincy

            code = captaincy.main(options, beat)
        elif options.host == "tensorboard" and options.captain:
            from paceline.agent import board

            code = board.main(options, beat)
        elif options.host == "tensorboard":
            from paceline.agent import showing

            code = showing.main(options, beat)
        else:
            from paceline.agent import member

            machine.become_subreaper()  # tasks that a spare forks, and what tasks leave behind, are its children
            code = member.main(options, instance, number, beat)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
        finally:  # also where the disk is full
            os._exit(code)


if __name__ == "__main__":
    sys.exit(main(parse(sys.argv[1])))
