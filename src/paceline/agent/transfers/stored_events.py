"""Bounds what the store keeps of events: if the captain has sent too many pieces, the older ones are replaced by one
with the events that still determine the state of the run, as in events.jsonl (see event_file.py).

A crash in between leaves pieces that were replaced: readers ignore them, and they are deleted the next time.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.agent import state_events
from paceline.agent.event_file import NAME, ROTATED, STORED, lines_of
from paceline.agent.goodput import Goodput
from paceline.agent.run_files import stamp
from paceline.storage.stored_run_files import StoredRunFiles, life_of
from paceline.storage.stores.protocol import ContinueCheck, TransferCanceled

MOST = 256  # pieces; most have slightly more than 256 KiB
KEPT = 128  # of these, the newest stay as they are
CHECK_EVERY = 32  # pieces that are sent between two checks of their number


def fold(archive: StoredRunFiles, host: str, scratch: str, should_continue: ContinueCheck) -> None:
    pieces = archive.pieces(host)
    if len(pieces) > MOST:
        older = pieces[:-KEPT]
        archive.send_folded(older[-1], _folded(archive, older, should_continue), scratch, should_continue)
    for piece in archive.replaced(host):
        archive.delete(piece)


def _folded(archive: StoredRunFiles, pieces: list[str], should_continue: ContinueCheck) -> dict[str, bytes]:
    events: list[dict[str, Any]] = []
    goodput, generation, at, life, rest = Goodput(), 0, "", "", b""
    others: dict[str, tuple[str, bytes]] = {}  # file name -> life that wrote it, contents
    for piece in pieces:
        if not should_continue(0):
            raise TransferCanceled(piece)
        before, life = life, life_of(piece)
        rest = rest if life == before else b""
        for name, data in archive.read(piece).items():
            if name == NAME:
                *lines, rest = (rest + data).split(b"\n")
                new = state_events.parse(lines)
                goodput.add_all(new)
                numbers = (each.get("generation") for each in new)
                generation = max([generation, *(number for number in numbers if type(number) is int)])
                at = next((str(each["at"]) for each in reversed(new) if "at" in each), at)
                events = state_events.needed([*events, *new])
            else:
                writer, contents = others.get(name, ("", b""))
                others[name] = life, contents + data if writer == life else data
    # Readers merge these events with a copy that they have, by time.
    mark = {"at": at or stamp(), "event": ROTATED, "generation": generation, STORED: True}
    lines = [*lines_of(events), json.dumps({**mark, "goodput": goodput.to_json()}).encode() + b"\n", rest]
    return {NAME: b"".join(lines), **{name: data for name, (_, data) in others.items()}}
