"""The events of a run, as they are recorded, until it ends or a time limit passes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

from paceline.client.find import Notify, ignore
from paceline.client.refreshed_folder import followed
from paceline.client.wait import Deadline
from paceline.view.events import Event, EventFile
from paceline.view.run_folders import Run

_POLL_S = 0.15


def read(
    run: Run, follow: bool = False, timeout: float | None = None, notify: Notify = ignore
) -> Iterator[list[tuple[Event, bytes]]]:
    """Yields events with their lines, oldest first, as often as there are new ones. `follow`: until the run ends.

    `timeout`: seconds until WaitTimeout is raised. `notify`: called at the end if events are missing.
    """
    deadline = Deadline(run, timeout)
    with (
        closing(EventFile(run.folder, old=True)) as file,
        followed(run.folder, follow, notify=notify) as has_ended,
    ):
        while True:
            is_last = not follow or has_ended()
            while new := file.read():
                yield new
            if is_last:
                break
            deadline.check("ended")
            time.sleep(_POLL_S)
        if file.problem:
            notify(file.problem)
