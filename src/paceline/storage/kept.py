"""What a run writes besides snapshots, kept at the same place: events, output, plan and report, in pieces.

A store cannot append, so a host sends what its files have grown by, from time to time, as one piece:

<run>/logs/<host>/<life>/<number>

A life is that of the host's folder: a host that was replaced begins another. A piece is a line of JSON, which says how
many bytes of which files follow, and these bytes. It is sent again with more, until it is large enough: then the next
begins where it ends. So the pieces of a life, in their order, hold each byte once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

from paceline.storage.files import write_all
from paceline.storage.manifest import VERSION, Damaged, Gone, read_object
from paceline.storage.store import Store, Wanted

FOLDER = "logs"
MOST = 4 * 1024 * 1024  # bytes of a piece; more where many files share it
READ_LIMIT = 64 * 1024 * 1024
_FILE = re.compile(r"(events\.jsonl|plan\.json|report\.json|logs/[^/\0]{1,255}\.log)")

Ranges = Mapping[str, tuple[str, int, int]]  # name of a file -> where it is, and which bytes of it


class Kept:
    def __init__(self, store: Store, run: str, transfers: Store | None = None) -> None:
        """`transfers`: the same for what takes its time."""
        self.store, self._transfers = store, transfers or store
        self._below = f"{run}/{FOLDER}"

    def send(self, piece: str, ranges: Ranges, scratch: str, wanted: Wanted) -> None:
        """`piece`: host, life and number, with slashes. `scratch`: a path of this machine for it."""
        head = {"version": VERSION, "files": {name: end - begin for name, (_, begin, end) in ranges.items()}}
        made = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(made, json.dumps(head).encode() + b"\n")
            for path, begin, end in ranges.values():
                write_all(made, part(path, begin, end))
        finally:
            os.close(made)
        self.store.send_all([(scratch, f"{self._below}/{piece}")], wanted, {})
        os.unlink(scratch)

    def pieces(self, host: str) -> list[str]:
        """One life after the other, in the order in which they were written."""
        return [name[len(self._below) + 1 :] for name in self.store.names(f"{self._below}/{host}/")]

    def read(self, piece: str) -> dict[str, bytes]:
        name = f"{self._below}/{piece}"
        data = self._transfers.read(name, READ_LIMIT)
        if data is None:
            raise Gone(f"{name} is gone")
        head, _, rest = data.partition(b"\n")
        files = read_object(head, name).get("files")
        found: dict[str, bytes] = {}
        for file, size in files.items() if isinstance(files, dict) else ():
            if not _FILE.fullmatch(file) or not isinstance(size, int) or not 0 <= size <= len(rest):
                raise Damaged(f"{name} is damaged: it does not hold what it says")
            found[file], rest = rest[:size], rest[size:]
        return found

    def ended(self, captain: str) -> bool:
        """Whether the run has said that it is over, which is the last that its captain says."""
        pieces = self.pieces(captain)
        last = self.read(pieces[-1]) if pieces else {}
        return "report.json" in last or b'"event": "run-ended"' in last.get("events.jsonl", b"")


def part(path: str, begin: int, end: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(begin)
        data = file.read(end - begin)
    if len(data) < end - begin:
        raise OSError(0, "it has become shorter", path)
    return data
