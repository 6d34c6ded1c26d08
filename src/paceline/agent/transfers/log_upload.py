"""Uploads a host's logs, events and reports to the snapshot location as they grow, so they survive the host.

The state of the upload is in a file next to them: a restarted agent resumes there, and sends the unfinished piece again
under the same name. The oldest output of a task is deleted if there is too much of it (`limits.log`), whether it was
uploaded or not: a store that is too slow, or unreachable, must not fill the disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Callable

from paceline.agent.event_file import NAME as EVENTS
from paceline.agent.net.loop import Loop
from paceline.agent.options import Options
from paceline.agent.run_files import replace, stamp
from paceline.agent.transfers import requests as req
from paceline.agent.transfers.porter_client import PorterClient
from paceline.agent.transfers.stored_events import CHECK_EVERY
from paceline.plan import Plan
from paceline.storage import log_parts
from paceline.storage.json_values import read_json
from paceline.storage.snapshots.manifest import INVALID_FIELDS, is_safe_path
from paceline.storage.stored_run_files import MOST

EVERY = 10.0  # seconds between uploads: the output that may be lost with a host
LARGE = 256 * 1024  # bytes; a piece of this size is complete and not sent again
LAST_S = 8.0  # time limit for the last upload
LONGEST_LINE = 128 * 1024  # bytes; longer lines may be split
_MOST_PIECES = 10**8  # their numbers have 8 digits


class LogUpload:
    def __init__(
        self, plan: Plan, options: Options, files: Mapping[str, str], porter: PorterClient, loop: Loop,
        warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`files`: name -> path, of files and logs that only this host writes, and only appends to."""
        outlives = plan.snapshots.in_bucket or plan.snapshots.claimed[0]
        self._files = dict(files) if options.echo and outlives else {}
        if not options.echo and plan.snapshots.to and not plan.snapshots.claimed[0]:
            # The run's folder is on the user's machine. But others may have access to the snapshot location, and must
            # be able to tell whether the run has ended before they delete anything there.
            self._files = {name: path for name, path in files.items() if name == "report.json"}
        self._location = plan.snapshots.to
        self._state_file = f"{options.folder}/.{options.host}.kept"
        self._porter, self._loop, self._warn = porter, loop, warn
        self._has_warned = False
        self._warned_of: set[str] = set()  # files of which something was deleted before it was sent
        self._is_uploading = False
        self._then: Callable[[], None] | None = None  # set once the run has ended
        self._last_failed = False  # the first of two tries after the end
        if not self._files:
            return
        try:
            state = read_json(self._state_file)
            begins = {name: int(state["begins"][name]) for name in files}
            self._life, self._number = str(state["life"]), int(state["number"])
            is_valid = 0 < self._number < _MOST_PIECES and min(begins.values()) >= 0
            if not is_valid or not is_safe_path(self._life) or self._life.split("/")[:-1] != [options.host]:
                raise ValueError(state)
        except (OSError, *INVALID_FIELDS):  # there is none, or it is damaged
            self._life = f"{options.host}/{stamp().replace(':', '').replace('-', '')}-{os.urandom(4).hex()}"
            self._number, begins = 1, dict.fromkeys(files, 0)
        self._begins: dict[str, int] = begins
        self._ends: dict[str, int] = dict(self._begins)  # file -> end of the current piece as last sent
        if self._write_state(self._number, self._begins):
            # A random delay, so that hosts that start together do not upload at the same time.
            loop.after(EVERY * os.urandom(1)[0] / 256, self._upload_regularly)
            self._fold_events()
        else:
            self._files = {}  # a later agent could not tell what has been uploaded

    def close(self, then: Callable[[], None]) -> None:
        """Calls `then` once everything is uploaded, or cannot be."""
        self._then = then
        if self._is_uploading or self._upload():
            self._loop.after(LAST_S, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        then, self._then, self._is_uploading, self._files = self._then, None, False, {}
        if then is not None:
            then()

    def _upload_regularly(self) -> None:
        if not self._is_uploading:
            self._upload()
        self._loop.after(EVERY, self._upload_regularly)

    def _upload(self, least: int = 1) -> bool:
        """Starts an upload if there are at least that many new bytes; returns whether it did."""
        if not self._files or not self._skip_deleted():
            return False
        ends = {name: self._end(name) for name in self._files}
        if sum(ends.values()) - sum(self._ends[name] for name in ends) < least:
            return False
        ranges = {name: (self._files[name], self._begins[name], end) for name, end in ends.items()}
        not_empty = {name: each for name, each in ranges.items() if each[1] < each[2]}
        request = req.UploadLogs(f"{self._life}/{self._number:08d}", not_empty, f"{self._state_file}.piece")
        self._is_uploading = True
        self._porter.ask(request, lambda answer: self._answered(ends, answer))
        return True

    def _skip_deleted(self) -> bool:
        """What was deleted cannot be sent any more: a new piece begins after it. Returns whether one can begin."""
        first = {name: log_parts.bounds(path)[0] for name, path in self._files.items()}
        if all(first[name] <= begin for name, begin in self._begins.items() if name in first):
            return True
        begins = {name: max(end, first.get(name, 0)) for name, end in self._ends.items()}
        if not self._write_state(self._number + 1, begins):
            return False
        for name, end in self._ends.items():
            if begins[name] > end and name not in self._warned_of:
                self._warned_of.add(name)
                self._warn(
                    f"output in {name} was deleted before it was uploaded to {self._location}, so far "
                    f"{begins[name] - end} bytes: it grows faster than it can be uploaded, and limits.log was reached"
                )
        self._number, self._begins, self._ends = self._number + 1, begins, dict(begins)
        return True

    def _end(self, name: str) -> int:
        """Where the current piece may end in this file: at the end of a line."""
        path, limit = self._files[name], self._begins[name] + max(MOST // len(self._files), LONGEST_LINE)
        try:
            size = log_parts.bounds(path)[1]
            if size <= limit:
                return max(size, self._ends[name])
            tail = log_parts.read_range(path, limit - LONGEST_LINE, limit)
        except OSError:
            return self._ends[name]  # the file does not exist yet, or its oldest part was just deleted
        return limit - LONGEST_LINE + (tail.rfind(b"\n") + 1 or LONGEST_LINE)

    def _answered(self, ends: dict[str, int], answer: req.Answer) -> None:
        self._is_uploading = False
        failure = answer if isinstance(answer, req.Failure) else None
        if failure is None:
            self._ends = ends
            self._start_next_piece()
        elif not self._has_warned:
            self._has_warned = True
            # The reason does not name this host: the captain shows the same warning from several hosts only once.
            reason = failure.reason or failure.text
            self._warn(f"cannot upload the run's logs and events to {self._location} ({reason}); retrying")
        # After the end, try twice: the first failure may only show that the captain, which serves it, was replaced.
        may_continue = failure is None or (self._then is not None and not self._last_failed)
        self._last_failed = self._then is not None and failure is not None
        if not (may_continue and self._upload(1 if self._then else LARGE)) and self._then is not None:
            self._finish()

    def _start_next_piece(self) -> None:
        """If the current piece is large enough."""
        is_large = sum(self._ends.values()) - sum(self._begins.values()) >= LARGE
        if is_large and self._write_state(self._number + 1, self._ends):
            self._number, self._begins = self._number + 1, dict(self._ends)
            if self._number % CHECK_EVERY == 0:
                self._fold_events()

    def _fold_events(self) -> None:
        """Bound what the store keeps of events. If this fails, it is tried again later."""
        if EVENTS in self._files:
            request = req.FoldEvents(self._life.split("/")[0], f"{self._state_file}.folded")
            self._porter.ask(request, lambda answer: None)

    def _write_state(self, number: int, begins: Mapping[str, int]) -> bool:
        """Before the next piece starts: otherwise a later agent might send the same bytes in two pieces."""
        try:
            replace(self._state_file, {"life": self._life, "number": number, "begins": dict(begins)})
            return True
        except OSError:
            return False
