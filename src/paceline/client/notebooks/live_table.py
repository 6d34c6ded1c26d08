"""A table of a run in a notebook that is updated until the run ends."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from paceline.client.control.wait import Deadline
from paceline.client.notebooks import html
from paceline.errors import Argument, Call, UsageError

if TYPE_CHECKING:
    from paceline.client.run import Run

INTERVAL_S = 1.0


def watch(run: Run, timeout: float | None = None) -> None:
    from paceline.client.reading import run_status
    from paceline.client.reading.refreshed_folder import followed
    from paceline.client.run import log_note
    from paceline.view.state import status_reader

    if not _in_notebook():
        remedy = ("use ", Call("events", run.id, (Argument("follow", True),)))
        raise UsageError("watch() needs a notebook", remedy=remedy)
    from IPython.display import HTML, display

    deadline = Deadline(run.id, timeout)
    handle, shown = None, ""
    with followed(run._run(deadline), follow=True, notify=log_note, until=deadline.until) as has_ended:
        while True:
            has_ended()  # writes the report of a run on a cluster
            status = run_status.status_of(status_reader.read(run._run()))
            text = html.of_status(status)
            if handle is None:
                handle = display(HTML(text), display_id=True)
            elif text != shown:
                handle.update(HTML(text))
            shown = text
            if not status.is_running:
                return
            deadline.check("ended")
            time.sleep(max(0.0, min(INTERVAL_S, deadline.remaining)))


def _in_notebook() -> bool:
    """Whether the interpreter is a kernel, which can replace what it has displayed."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
