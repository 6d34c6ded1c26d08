"""A table of a run in a notebook that is updated until the run ends."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from paceline.client import html
from paceline.client.wait import Deadline
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.client.run import Run

INTERVAL_S = 1.0
CLUSTER_INTERVAL_S = 3.0  # each update asks the API server


def watch(run: Run, timeout: float | None = None) -> None:
    from paceline.view import run_folders

    if not _in_notebook():
        raise UsageError("watch() needs a notebook", remedy="use run.events(follow=True), or `paceline status`")
    from IPython.display import HTML, display

    record = run._run()
    deadline = Deadline(record, timeout)
    interval = CLUSTER_INTERVAL_S if run_folders.on_cluster(record.folder) else INTERVAL_S
    status = run.status()
    shown = html.of_status(status)
    handle = display(HTML(shown), display_id=True)
    while status.is_running:
        deadline.check("ended")
        time.sleep(max(0.0, min(interval, deadline.remaining)))
        status = run.status()
        text = html.of_status(status)
        if text != shown:
            handle.update(HTML(text))
            shown = text


def _in_notebook() -> bool:
    """Whether the interpreter is a kernel, which can replace what it has displayed."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
