"""Fetches parts of a snapshot from the hosts that have them, several files at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Callable

from paceline.storage.snapshots.manifest import Damaged, Gone, SnapshotId, is_safe_path
from paceline.storage.stores.parallel import together
from paceline.storage.stores.protocol import ContinueCheck

if TYPE_CHECKING:
    from paceline.storage.stores.peer_client import PeerStore

AT_ONCE = 4  # files, each over a connection of its own
Dial = Callable[[str], "PeerStore"]


def fetch_parts(
    addresses: Mapping[str, str], snapshot: SnapshotId, folder: str, dial: Dial | None, should_continue: ContinueCheck
) -> int:
    """Fetch each part to `<folder>/<task>`; return the number of bytes. `addresses`: of the hosts, by task."""
    if not addresses:
        return 0
    assert dial is not None
    with _connections(dial) as connection:
        files = []
        for task, address in addresses.items():
            prefix = f"{task}/{snapshot}/"
            names = connection(address).names(prefix)
            if not names:
                raise Gone(f"{address} does not have {task} of {snapshot}")
            files += [(address, task, name, name[len(prefix) :]) for name in names]

        def fetch(file: tuple[str, str, str, str], check: ContinueCheck) -> int:
            address, task, name, path = file
            if not is_safe_path(path):
                raise Damaged(f"{address} lists the path {path!r}, which is not valid")
            target = f"{folder}/{task}/{path}"
            os.makedirs(os.path.dirname(target), exist_ok=True)
            try:
                return connection(address).fetch(name, target, check)[0]
            except KeyError:
                raise Gone(f"{address} does not have {name}") from None

        return sum(together(fetch, files, lambda _: AT_ONCE, should_continue))


@contextmanager
def _connections(dial: Dial) -> Iterator[Dial]:
    """A connection for each thread and address, closed at the end."""
    open_connections: dict[tuple[int, str], PeerStore] = {}

    def connection(address: str) -> PeerStore:
        key = threading.get_ident(), address
        if key not in open_connections:
            open_connections[key] = dial(address)
        return open_connections[key]

    try:
        yield connection
    finally:
        for each in open_connections.values():
            each.close()
