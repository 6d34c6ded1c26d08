"""Keeps what a host writes at the place for snapshots, as it grows, so that it is not lost with the host.

It is read from the files themselves. How far it is stands in a file beside them: an agent that is started again goes on
from there, and sends the piece that was not finished once more, under the same name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Callable

from paceline.agent.journal import replace, stamp
from paceline.agent.loop import Loop
from paceline.agent.options import Options
from paceline.agent.porting import Answer, Porting
from paceline.plan import Plan
from paceline.storage.kept import MOST, part

EVERY = 10.0  # seconds between two looks: so much may be lost with a host
LARGE = 256 * 1024  # bytes; a piece that has them is not sent again
LAST_S = 8.0  # for what is left at the end
LONGEST_LINE = 128 * 1024  # bytes; what is longer may be cut


class Keeping:
    def __init__(
        self, plan: Plan, options: Options, files: Mapping[str, str], porting: Porting, loop: Loop,
        warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`files`: name -> path, of those that this host alone writes, and only at their ends."""
        outlives = plan.snapshots.in_bucket or plan.snapshots.claimed[0]
        self._files = dict(files) if options.echo and outlives else {}
        if not options.echo and plan.snapshots.to and not plan.snapshots.claimed[0]:
            # The run's folder is on the machine of whoever reads it. But the place is seen by others, who must be able
            # to tell whether the run is over before they delete anything there.
            self._files = {name: path for name, path in files.items() if name == "report.json"}
        self._place = plan.snapshots.to
        self._noted = f"{options.folder}/.{options.host}.kept"
        self._porting, self._loop, self._warn = porting, loop, warn
        self._warned = False
        self._asked = False
        self._then: Callable[[], None] | None = None
        self._failed = False  # at the end
        if not self._files:
            return
        try:
            with open(self._noted) as file:
                noted = json.load(file)
        except (OSError, ValueError):
            life = f"{options.host}/{stamp().replace(':', '').replace('-', '')}-{os.urandom(4).hex()}"
            noted = {"life": life, "number": 1, "begins": dict.fromkeys(files, 0)}
        self._life, self._number = str(noted["life"]), int(noted["number"])
        self._begins: dict[str, int] = noted["begins"]
        self._ends: dict[str, int] = dict(self._begins)  # of the piece as it was last sent
        if self._note(self._number, self._begins):
            loop.after(EVERY * os.urandom(1)[0] / 256, self._look)  # hosts that were started together take turns
        else:
            self._files = {}  # it could not be told later what is there already

    def close(self, then: Callable[[], None]) -> None:
        """`then`: once all of it is there, or cannot be."""
        self._then = then
        if self._asked or self._keep():
            self._loop.after(LAST_S, self._done)
        else:
            self._done()

    def _done(self) -> None:
        then, self._then, self._asked, self._files = self._then, None, False, {}
        if then is not None:
            then()

    def _look(self) -> None:
        if not self._asked:
            self._keep()
        self._loop.after(EVERY, self._look)

    def _keep(self, least: int = 1) -> bool:
        """Whether there are so many new bytes: they are on their way."""
        ends = {name: self._end(name) for name in self._files}
        if sum(ends.values()) - sum(self._ends[name] for name in ends) < least:
            return False
        ranges = {name: (self._files[name], self._begins[name], end) for name, end in ends.items()}
        request = {
            "do": "keep", "piece": f"{self._life}/{self._number:08d}", "scratch": f"{self._noted}.piece",
            "ranges": {name: found for name, found in ranges.items() if found[1] < found[2]},
        }  # fmt: skip
        self._asked = True
        self._porting.ask(request, lambda answer: self._answered(ends, answer))
        return True

    def _end(self, name: str) -> int:
        """How far the piece may go in this file: to the end of a line."""
        path, most = self._files[name], self._begins[name] + max(MOST // len(self._files), LONGEST_LINE)
        try:
            size = os.stat(path).st_size
            if size <= most:
                return size
            last = part(path, most - LONGEST_LINE, most)
        except OSError:
            return self._ends[name]  # there is no such file yet
        return most - LONGEST_LINE + (last.rfind(b"\n") + 1 or LONGEST_LINE)

    def _answered(self, ends: dict[str, int], answer: Answer) -> None:
        self._asked = False
        error = answer.get("error")
        if error is None:
            self._ends = ends
            self._turn()
        elif not self._warned:
            self._warned = True
            what, _, why = str(error["text"]).partition(": ")  # each host has names of its own: they say it alike
            self._warn(f"what the run writes is not kept at {self._place} for now ({why or what}): it is tried again")
        # At the end it is tried twice: that the captain was replaced may show only now, where it has the place.
        again = error is None or (self._then is not None and not self._failed)
        self._failed = self._then is not None and error is not None
        if not (again and self._keep(1 if self._then else LARGE)) and self._then is not None:
            self._done()

    def _turn(self) -> None:
        """To the next piece, where this one is large enough."""
        large = sum(self._ends.values()) - sum(self._begins.values()) >= LARGE
        if large and self._note(self._number + 1, self._ends):
            self._number, self._begins = self._number + 1, dict(self._ends)

    def _note(self, number: int, begins: Mapping[str, int]) -> bool:
        """Before the next piece is begun: else what is in this one might be sent again in that."""
        try:
            replace(self._noted, {"life": self._life, "number": number, "begins": dict(begins)})
            return True
        except OSError:
            return False
