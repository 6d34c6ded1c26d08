"""Events, output, plan and report of a run, stored in pieces next to its snapshots.

A store cannot append to files, so from time to time a host sends the new data of its files as one piece:

<run>/logs/<host>/<life>/<number>

<life> identifies the host's folder: a replacement host has a new folder, and starts a new life. A piece is a line of
JSON with the size of each part, followed by the parts. It is sent again with more data until it is large enough; the
next piece starts where it ends. So the pieces of a life, in order, contain each byte once; if the store was too slow or
unreachable for so long that the host had to delete output that was not sent, they lack that output.

If the captain has sent too many pieces, the oldest are replaced by one (see agent/transfers/stored_events.py). It has
the contents of all pieces up to <life>/<number>, except events that no longer determine the state of the run:

<run>/logs/<host>/<life>-folded/<number>
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping

from paceline.storage import log_parts
from paceline.storage.local_files import write_all
from paceline.storage.snapshots.manifest import VERSION, Damaged, Gone, read_object
from paceline.storage.stores.protocol import ContinueCheck, Store

FOLDER = "logs"
MOST = 4 * 1024 * 1024  # bytes of a piece; more if many files share it
READ_LIMIT = 64 * 1024 * 1024
_FOLDED = "-folded"
_PIECE = re.compile(r"[0-9]{8}")  # other files, such as those that a file manager leaves there, are ignored
TASK_NAME = r"[0-9A-Za-z-]{1,100}"  # it becomes the name of a file on the reader's machine
_FILE = re.compile(rf"(events\.jsonl|plan\.json|report\.json|logs/{TASK_NAME}\.log)")

Ranges = Mapping[str, tuple[str, int, int]]  # file name -> path, positions of the first byte and of the end


class StoredRunFiles:
    def __init__(self, store: Store, run: str, transfers: Store | None = None) -> None:
        """`transfers`: the same store with a longer timeout, for large reads."""
        self.store, self._transfers = store, transfers or store
        self._below = f"{run}/{FOLDER}"

    def send(self, piece: str, ranges: Ranges, scratch: str, should_continue: ContinueCheck) -> None:
        """`piece`: `host/life/number`. `scratch`: path of a temporary file."""
        sizes = {name: end - begin for name, (_, begin, end) in ranges.items()}
        parts = (log_parts.read_range(path, begin, end) for path, begin, end in ranges.values())
        self._send(piece, sizes, parts, scratch, should_continue)

    def send_folded(
        self, last: str, contents: Mapping[str, bytes], scratch: str, should_continue: ContinueCheck
    ) -> None:
        """Send one piece that replaces all up to `last`."""
        host, _, number = last.split("/")
        piece = f"{host}/{life_of(last)}{_FOLDED}/{number}"
        sizes = {name: len(data) for name, data in contents.items()}
        self._send(piece, sizes, contents.values(), scratch, should_continue)

    def _send(
        self, piece: str, sizes: Mapping[str, int], parts: Iterable[bytes], scratch: str, should_continue: ContinueCheck
    ) -> None:
        head = {"version": VERSION, "files": sizes}
        target = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(target, json.dumps(head).encode() + b"\n")
            for part in parts:
                write_all(target, part)
        finally:
            os.close(target)
        self.store.send_all([(scratch, f"{self._below}/{piece}")], should_continue, {})
        os.unlink(scratch)

    def pieces(self, host: str) -> list[str]:
        """One life after the other, oldest first. Without those that were replaced, but could not be deleted."""
        return self._listed(host)[0]

    def replaced(self, host: str) -> list[str]:
        """Pieces whose contents are in another one, too."""
        return self._listed(host)[1]

    def _listed(self, host: str) -> tuple[list[str], list[str]]:
        names = self.store.names(f"{self._below}/{host}/")
        pieces = [name[len(self._below) + 1 :] for name in names if _PIECE.fullmatch(name.rpartition("/")[2])]
        pieces.sort(key=_position)
        first = max((number for number, piece in enumerate(pieces) if _position(piece)[2]), default=0)
        return pieces[first:], pieces[:first]

    def delete(self, piece: str) -> None:
        self.store.delete(f"{self._below}/{piece}")

    def read(self, piece: str) -> dict[str, bytes]:
        name = f"{self._below}/{piece}"
        data = self._transfers.read(name, READ_LIMIT)
        if data is None:
            raise Gone(f"{name} is missing")
        head, _, body = data.partition(b"\n")
        files = read_object(head, name).get("files")
        contents: dict[str, bytes] = {}
        for file, size in files.items() if isinstance(files, dict) else ():
            if not _FILE.fullmatch(file) or not isinstance(size, int) or not 0 <= size <= len(body):
                raise Damaged(f"{name} is damaged: its contents do not match its header")
            contents[file], body = body[:size], body[size:]
        return contents

    def ended(self, captain: str) -> bool:
        """Whether the last piece of the captain reports the end of the run."""
        pieces = self.pieces(captain)
        last = self.read(pieces[-1]) if pieces else {}
        return "report.json" in last or b'"event": "run-ended"' in last.get("events.jsonl", b"")


def life_of(piece: str) -> str:
    """The life that wrote the end of a piece.

    >>> life_of("captain/20261115T043011.123Z-1a2b3c4d-folded/00000005")
    '20261115T043011.123Z-1a2b3c4d'
    """
    life = "/".join(piece.split("/")[1:-1])
    return life[: -len(_FOLDED)] if life.endswith(_FOLDED) else life


def _position(piece: str) -> tuple[str, str, bool]:
    """Pieces in order; one that replaces others comes after them."""
    life = life_of(piece)
    return life, piece.rpartition("/")[2], f"/{life}{_FOLDED}/" in piece
