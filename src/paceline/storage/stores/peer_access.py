"""What a member may do in the store that its captain serves: store parts of snapshots, logs and what frameworks have
compiled, and read snapshots.

Everything else there belongs to the captain: records of generations, manifests and results of evaluators decide which
snapshots exist, and obstore is code that all hosts run.
"""

from __future__ import annotations

import re
from typing import Callable

from paceline.plan import ORDER
from paceline.storage.compiled_files import FOLDER as COMPILED
from paceline.storage.snapshots.manifest import is_safe_path, parse_id
from paceline.storage.snapshots.repository import MANIFEST
from paceline.storage.stored_run_files import FOLDER as LOGS
from paceline.storage.stores.protocol import StoreError

Access = Callable[[str, str], None]  # verb and name of a request; raises StoreError if it is not allowed

_TASK = re.compile(rf"({'|'.join(ORDER)})-(0|[1-9][0-9]{{0,6}})")
_HOST = re.compile(rf"({'|'.join(ORDER)})-host-(0|[1-9][0-9]{{0,6}})")
_PIECE = re.compile(r"[0-9A-Za-z.-]{1,64}/[0-9]{8}")  # of a log: life and number, see stored_run_files
_SHOWN = 200  # characters of a name in a message


class MemberAccess:
    def __init__(
        self, run: str, library: str = "", snapshots: bool = True, has: Callable[[str], bool] | None = None
    ) -> None:
        """`library`: the name of obstore's archive, if it is served. `snapshots`: whether the store contains snapshots.
        `has`: whether a name exists: the parts of a committed snapshot do not change any more."""
        self._run, self._library, self._snapshots = run, library, snapshots
        self._has = has

    def __call__(self, verb: str, name: str) -> None:
        if verb == "send" and self._snapshots and (self._is_part(name) or self._is_log(name)):
            if self._is_part(name) and self._is_committed(name):
                raise StoreError(f"{name[:_SHOWN]!r} cannot be written: its snapshot is committed")
            return
        if verb in ("send", "fetch") and self._snapshots and self._is_compiled(name):
            return
        if verb == "read" and self._snapshots and self._is_manifest(name):
            return
        if verb == "fetch" and ((self._snapshots and self._is_part(name, 0)) or (name and name == self._library)):
            return
        what = {
            "send": "parts of snapshots, logs and compiled code",
            "read": "manifests",
            "fetch": "parts of snapshots and compiled code",
        }.get(verb)
        limit = f"of {self._run}, members may {verb} only {what}" if what else "members may only send, read and fetch"
        raise StoreError(f"{str(verb)[:20]} {name[:_SHOWN]!r} is not allowed: {limit}")

    def _below_run(self, name: str) -> str:
        """Empty: the name is not valid below the run."""
        prefix = f"{self._run}/"
        return name[len(prefix) :] if name.startswith(prefix) else ""

    def _is_part(self, name: str, first: int = 1) -> bool:
        """`first`: the first generation; 0 is the snapshot that the run starts from, which only the captain stores."""
        snapshot, _, below = self._below_run(name).partition("/")
        task, _, path = below.partition("/")
        id = parse_id(snapshot)
        return id is not None and id.generation >= first and bool(_TASK.fullmatch(task)) and is_safe_path(path)

    def _is_log(self, name: str) -> bool:
        folder, _, below = self._below_run(name).partition("/")
        host, _, piece = below.partition("/")
        return folder == LOGS and bool(_HOST.fullmatch(host)) and bool(_PIECE.fullmatch(piece)) and is_safe_path(piece)

    def _is_compiled(self, name: str) -> bool:
        folder, _, host = self._below_run(name).partition("/")
        return folder == COMPILED and bool(_HOST.fullmatch(host))

    def _is_manifest(self, name: str) -> bool:
        snapshot, _, file = self._below_run(name).partition("/")
        return parse_id(snapshot) is not None and file == MANIFEST

    def _is_committed(self, name: str) -> bool:
        try:
            manifest = f"{self._run}/{self._below_run(name).partition('/')[0]}/{MANIFEST}"
            return self._has is not None and self._has(manifest)
        except StoreError:
            return False  # writing the file fails, too, and its error says more


def part_access(verb: str, name: str) -> None:
    """What a member may do in the parts that another member serves: list the files of a part, and fetch them. Names are
    `<task>/<snapshot>/<path>`."""
    task, _, below = name.partition("/")
    snapshot, _, path = below.partition("/")
    is_part = bool(_TASK.fullmatch(task)) and parse_id(snapshot) is not None
    if not is_part or not ((verb == "sizes" and not path) or (verb == "fetch" and is_safe_path(path))):
        raise StoreError(f"{str(verb)[:20]} {name[:_SHOWN]!r} is not allowed: members may only list and fetch parts")


class ReaderAccess:
    """A command line that reads the snapshots of a run, and deletes them for its user."""

    _VERBS = frozenset(("read", "fetch", "has", "folders", "names", "digest", "delete", "clear"))

    def __init__(self, run: str) -> None:
        self._run = run

    def __call__(self, verb: str, name: str) -> None:
        if verb not in self._VERBS:
            raise StoreError(f"{str(verb)[:20]} {name[:_SHOWN]!r} is not allowed")
        path = name[:-1] if name.endswith("/") else name
        if not name.startswith(f"{self._run}/") or not is_safe_path(path):
            raise StoreError(f"{name[:_SHOWN]!r} does not belong to run {self._run}")
