"""Prepares the process of the view: where it writes, how many files it may open, which colors it uses."""

from __future__ import annotations

import os
import resource
import signal
import termios
from typing import Any

from paceline.client.reading.find_run import Target
from paceline.client.run import Run
from paceline.watch.terminal_guard import restore_after_parent


def show(run: Run | None, target: Target) -> int:
    """`run`: None shows all runs. Returns the exit code."""
    os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")
    if os.environ.get("TERM", "").startswith("vt"):
        os.environ["NO_COLOR"] = "1"  # these terminals have no colors
    elif not os.environ.get("NO_COLOR"):
        os.environ.pop("NO_COLOR", None)  # an empty value means colors
    _allow_many_files()
    # Threads of the view write to clusters: one that hangs up, as a captain does in the end, must not end the view.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    parent, settings = os.getppid(), termios.tcgetattr(1)
    own_settings: list[Any] | None = None
    errors = os.dup(2)
    os.dup2(1, 2)  # textual draws on standard error, which may be redirected to a file
    try:
        from paceline.watch.app import WatchApp, is_ascii_only

        app = WatchApp(run, target, is_ascii_only())
        code = app.run(mouse=False)  # so that text can be selected as usual
        own_settings = app.terminal_settings
        if app.error is not None:
            raise app.error
        return code or 0
    finally:
        restore_after_parent(parent, settings, own_settings)
        os.dup2(errors, 2)
        os.close(errors)


def _allow_many_files() -> None:
    """The logs of a thousand tasks are open at the same time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(65536, hard) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
