"""The processes of a credential plugin that has to be ended: killing the plugin alone leaves its children running.

A process group of its own could be killed as a whole, but the terminal would stop it as soon as it asks for a password.
So the processes are found by a variable that they inherit. One that has created a session of its own, such as an agent
that keeps keys for later commands, is meant to stay.
"""

from __future__ import annotations

import atexit
import os
import signal
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.agent import os_processes

_MARK = "PACELINE_CREDENTIAL_PLUGIN"
_MOST_PASSES = 20  # a process may start another one just before it is killed
_running: set[str] = set()  # marks of the plugins that run, in any thread


@contextmanager
def marked(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment for a plugin. If the plugin fails, reaches its time limit or is interrupted, everything that it
    has started is killed; so it is if this process exits in the meantime. Failures count because Ctrl-C also reaches
    the plugin: a thread other than the main one sees only that the plugin has failed."""
    mark = uuid.uuid4().hex
    _running.add(mark)
    try:
        yield {**environment, _MARK: mark}
    except BaseException:
        _kill(mark)
        raise
    finally:
        _running.discard(mark)


@atexit.register
def _kill_all() -> None:
    for mark in list(_running):
        _kill(mark)


def _kill(mark: str) -> None:
    """Without /proc, only the plugin itself is killed, by its caller."""
    for _ in range(_MOST_PASSES):
        pids = [pid for pid in _processes() if os_processes.environment_of(pid, _MARK) == mark]
        for pid in pids:
            os_processes.send_signal(pid, signal.SIGKILL)
        if not pids:
            return


def _processes() -> Iterator[int]:
    """Those of this user and this session."""
    user, session = os.getuid(), os.getsid(0)
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if path.stat().st_uid == user and os.getsid(int(path.name)) == session:
                yield int(path.name)
        except OSError:
            continue  # it has ended
