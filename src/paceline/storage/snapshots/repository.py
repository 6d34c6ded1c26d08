"""The snapshots of one run in one store: the manifest is written last; without it, a snapshot does not exist."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.storage import compiled_files, stored_run_files, tensorboard_event_files
from paceline.storage.local_files import copy
from paceline.storage.snapshots import chain, evaluation, manifest
from paceline.storage.snapshots.chain import Record
from paceline.storage.snapshots.evaluation import Evaluation
from paceline.storage.snapshots.generation_records import KEPT, GenerationRecords
from paceline.storage.snapshots.manifest import Damaged, File, Gone, Manifest, Part, SnapshotId, is_safe_path
from paceline.storage.stores.parallel import together
from paceline.storage.stores.protocol import PIECE, ContinueCheck, Sent, Store, StoreError, TransferCanceled

MANIFEST = "manifest.json"
_SHOWN = 200  # characters of a path in a message


class Unfit(Exception):
    """A folder that a task wrote cannot become a snapshot; the text names the file."""


def always(_: int) -> bool:
    return True


def run_exists(location: str, run: str) -> StoreError:
    """The error for a run id that another run already uses at the location."""
    address = f"{location.rstrip('/')}/{run}"
    return StoreError(
        f"another run {run} already exists at {location}",
        remedy=f"choose another id (--run), start from that run (--set snapshots.from={address}), "
        f"or delete it (`paceline delete --snapshots {address}`)",
    )


@dataclass(frozen=True)
class Inventory:
    """The records and committed snapshots of a run in the store."""

    records: dict[int, Record]
    committed: frozenset[SnapshotId]

    @property
    def generation(self) -> int:
        return max(self.records, default=0)

    def current(self) -> list[SnapshotId]:
        """Snapshots on the current chain, newest first."""
        return chain.current(self.records, self.committed)


class SnapshotRepository:
    def __init__(self, store: Store, run: str, token: str = "", location: str = "") -> None:
        """`token`: identifies the run that writes; another run with the same id has another token. `location`: the
        address of the store, for messages."""
        self._store = store
        self.run = run
        self._token, self._location = token, location
        self._records = GenerationRecords(store, run)
        self._sending: SnapshotId | None = None  # the snapshot that was sent last,
        self._sent: dict[str, Sent] = {}  # and the files that were sent before it failed, by task

    # ---- reading

    def inventory(self) -> Inventory:
        self.claim()
        records = self._records.read_all()
        ids = filter(None, map(manifest.parse_id, self._store.folders(f"{self.run}/")))
        return Inventory(records, frozenset(id for id in ids if self.has(id)))

    def manifest(self, id: SnapshotId) -> Manifest:
        name = self._manifest(id)
        data = self._store.read(name, manifest.MOST_BYTES)
        if data is None:
            raise Gone(f"{name} is missing")
        parsed = manifest.parse(data, name)
        if (parsed.run, parsed.id) != (self.run, id):
            raise Damaged(f"{name} is the manifest of another snapshot: {parsed.run} {parsed.id}")
        return parsed

    def has(self, id: SnapshotId) -> bool:
        return self._store.has(self._manifest(id))

    def taken(self) -> bool:
        """Whether a run with this id has used the store. Parts of a snapshot alone do not count: a member may have sent
        them after the store was lost with its captain, and recreated."""
        if not self._records.is_empty():
            return True
        return any(map(self.has, filter(None, map(manifest.parse_id, self._store.folders(f"{self.run}/")))))

    def claim(self) -> None:
        """Call before the run writes anything: two runs with the same id would resume from, and delete, each other's
        snapshots. All captains of a run have its token, so they may claim it again."""
        if not self._token:
            return
        owner = self._records.owner()
        if owner is None:
            if not self.taken():
                self._records.write_owner(self._token)
            owner = self._records.owner()  # the run that came first
        if owner != self._token:
            raise run_exists(self._location, self.run)

    # ---- starting a generation

    def begin(
        self, generation: int, parent: SnapshotId | None, seen: Iterable[SnapshotId] = (), by: str = ""
    ) -> list[SnapshotId]:
        """Write the record of a generation, before it commits anything. `parent`: may be committed later. `seen`: the
        current snapshots when the parent was chosen. `by`: id of the captain that started the generation; this captain,
        or the next one, may write the same record again if it gets no reply.

        If the previous generation has since committed a snapshot later than the parent, return its current snapshots,
        newest first: their commit may already be confirmed to the writer. The caller then starts one more generation,
        from the newest of these.
        """
        self.claim()
        self._records.check_newest(generation)
        if not self._records.write(Record(generation, parent, by or os.urandom(8).hex())):
            return []
        inventory = self.inventory()
        previous = {number: record for number, record in inventory.records.items() if number != generation}
        current, expected = chain.current(previous, inventory.committed), {*seen, *inventory.current()}
        return current if any(id not in expected for id in current) else []

    # ---- commit

    def send(self, id: SnapshotId, task: str, folder: str, should_continue: ContinueCheck = always) -> Part:
        """Send the folder of a task as a part of the snapshot. Existing files are replaced: the same task of the same
        generation wrote them."""
        if id != self._sending:
            self._sending, self._sent = id, {}
        names = {path: self._file(id, task, path) for path in sorted(files_of(folder))}
        _check_manifest_size(len(names), sum(map(len, names)) + manifest.FILE_BYTES * len(names))
        sent = self._sent.setdefault(task, {})
        self._store.send_all([(f"{folder}/{path}", name) for path, name in names.items()], should_continue, sent)
        del self._sent[task]  # if it is requested again, the store has lost it
        return Part(task, tuple(File(path, *sent[name]) for path, name in names.items()))

    def commit(self, manifest: Manifest, generation: int = 0) -> bool:
        """False: already committed. `generation`: the newest that the captain knows, by default that of the snapshot.
        Superseded: it was written, but there is a later generation, so it may not be on the chain."""
        is_new = self.create(manifest)
        self._records.check_newest(generation or manifest.id.generation)
        return is_new

    def create(self, manifest: Manifest) -> bool:
        data = manifest.to_bytes()
        _check_manifest_size(sum(len(part.files) for part in manifest.parts), len(data))
        return self._store.create(self._manifest(manifest.id), data)

    # ---- evaluation

    def evaluate(self, id: SnapshotId, result: Evaluation) -> Evaluation:
        """Record the result and return the valid one: the first of two evaluations of a snapshot wins. Gone: the
        snapshot was deleted in the meantime."""
        if not self.has(id):
            raise Gone(f"{self._manifest(id)} is missing")
        name = f"{self.run}/{id}/{evaluation.NAME}"
        return result if self._store.create(name, result.to_bytes()) else self.evaluation(id) or result

    def evaluation(self, id: SnapshotId) -> Evaluation | None:
        """None: it has not been evaluated, or the result cannot be read."""
        name = f"{self.run}/{id}/{evaluation.NAME}"
        data = self._store.read(name, evaluation.MOST_BYTES)
        try:
            return None if data is None else evaluation.parse(data, name)
        except (Damaged, manifest.Newer):
            return None

    # ---- restore

    def fetch(
        self, manifest: Manifest, folder: str, should_continue: ContinueCheck = always, local_copies: Iterable[str] = ()
    ) -> int:
        """Fetch into a new folder, which appears only when all files are verified. Return the number of bytes fetched.

        `local_copies`: folders with `<task>/<snapshot>/<path>`; files in them that match the manifest are not fetched.
        """
        parent, name = os.path.split(folder)
        partial = f"{parent}/.{name}.{os.urandom(4).hex()}.partial"
        files = manifest.files()

        def fetch(item: tuple[str, tuple[str, File]], check: ContinueCheck) -> int:
            path, (task, file) = item
            target = f"{partial}/{path}"
            for copies in local_copies:
                if _copy_if_intact(f"{copies}/{task}/{manifest.id}/{path}", file, target, check):
                    return 0
            self._fetch_file(self._file(manifest.id, task, path), file, target, check)
            return file.size

        try:
            for below in {"", *map(os.path.dirname, files)}:
                os.makedirs(f"{partial}/{below}", exist_ok=True)
            received = together(
                fetch, files.items(), lambda item: self._store.at_once(item[1][1].size), should_continue
            )
            os.rename(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return sum(received)

    def _fetch_file(self, name: str, file: File, target: str, should_continue: ContinueCheck) -> None:
        received = 0

        def check(size: int) -> bool:
            """The sizes in the manifest were checked against the free space: a larger file may fill the disk."""
            nonlocal received
            received += size
            return received <= file.size + PIECE and should_continue(size)

        try:
            digest = self._store.fetch(name, target, check)
        except KeyError:
            raise Gone(f"{name} is missing") from None
        except TransferCanceled:
            if received > file.size + PIECE:
                raise Damaged(f"{name} is damaged: it is larger than its manifest says") from None
            raise
        _check_digest(name, digest, file)

    def check(self, id: SnapshotId, task: str, file: File, should_continue: ContinueCheck = always) -> None:
        """Read every byte of the file in the store; Damaged if it differs from what was committed."""
        name = self._file(id, task, file.path)
        try:
            digest = self._store.digest(name, should_continue)
        except KeyError:
            raise Gone(f"{name} is missing") from None
        _check_digest(name, digest, file)

    def check_all(self, manifest: Manifest, should_continue: ContinueCheck = always) -> None:
        """`check` for all files that a restore reads."""

        def check(item: tuple[str, File], continue_check: ContinueCheck) -> None:
            self.check(manifest.id, *item, continue_check)

        together(check, manifest.files().values(), lambda item: self._store.at_once(item[1].size), should_continue)

    # ---- retention

    def delete(self, id: SnapshotId, generation: int | None = None) -> None:
        """Deletes the manifest first: from then on the snapshot does not exist. `generation`: the newest that the
        captain knows; if there is a later one, another captain decides what is deleted (Superseded)."""
        if generation is not None:
            self._records.check_newest(generation)
        self._store.delete(self._manifest(id))
        self._store.clear(f"{self.run}/{id}/")

    def delete_uncommitted(self, id: SnapshotId, generation: int) -> None:
        """Delete what was sent of a snapshot, unless it is committed. The caller makes sure that nobody sends it or
        commits it from now on. `generation`: as for `delete`."""
        self._records.check_newest(generation)
        if not self.has(id):
            self._store.clear(f"{self.run}/{id}/")

    def sweep(self, generation: int, parent: SnapshotId | None = None) -> None:
        """Delete uncommitted or partly deleted snapshots of earlier generations, which will never complete them; except
        `parent`, which this generation may still commit. The record of `generation` must exist. Records of generations
        older than all snapshots are deleted, too: a captain that restarts reads all of them."""
        ids = set(filter(None, map(manifest.parse_id, self._store.folders(f"{self.run}/"))))
        committed = set(filter(self.has, ids))
        for id in ids - committed:
            if id.generation < generation and id != parent:
                self._store.clear(f"{self.run}/{id}/")
        needed = {id.generation for id in (*committed, parent) if id is not None}
        self._records.delete_before(min([generation - KEPT, *needed]))

    def delete_all(self) -> None:
        """Delete everything of the run, logs included, and nothing else: first all manifests, last the records, which
        define the chain."""
        ids = list(filter(None, map(manifest.parse_id, self._store.folders(f"{self.run}/"))))
        for id in ids:
            self._store.delete(self._manifest(id))
        for id in ids:
            self.delete(id)
        self._store.clear(f"{self.run}/{stored_run_files.FOLDER}/")
        self._store.clear(f"{self.run}/{tensorboard_event_files.FOLDER}/")
        self._store.clear(f"{self.run}/{compiled_files.FOLDER}/")
        self._records.delete_all()

    def _manifest(self, id: SnapshotId) -> str:
        return f"{self.run}/{id}/{MANIFEST}"

    def _file(self, id: SnapshotId, task: str, path: str) -> str:
        return f"{self.run}/{id}/{task}/{path}"


def _check_manifest_size(files: int, size: int) -> None:
    """`size`: bytes of these files in a manifest."""
    if size > manifest.MOST_BYTES:
        limit = f"{manifest.MOST_BYTES >> 20} MiB, enough for about 400,000 files"
        raise Unfit(f"its {files} files take {-(-size >> 20)} MiB in the manifest, and the limit is {limit}")


def _copy_if_intact(source: str, file: File, target: str, should_continue: ContinueCheck) -> bool:
    """False if the local file does not exist, or differs from what was committed."""
    try:
        if copy(source, target, should_continue, sync=False) == (file.size, file.sha256):
            return True
        os.unlink(target)
    except OSError:
        pass
    return False


def files_of(folder: str, what: str = "a snapshot") -> Iterable[str]:
    folders = [""]
    while folders:
        below = folders.pop()
        with os.scandir(f"{folder}/{below}") as entries:
            for entry in entries:
                path = f"{below}{entry.name}"
                mode = entry.stat(follow_symlinks=False).st_mode
                if not is_safe_path(path):
                    raise Unfit(f"{_shown(path)} is not a valid path for a file in {what}")
                if stat.S_ISDIR(mode):
                    folders.append(f"{path}/")
                elif stat.S_ISREG(mode):
                    yield path
                else:
                    raise Unfit(f"{_shown(path)} is not a regular file: {what} can contain only files and folders")


def _shown(path: str) -> str:
    return repr(path if len(path) <= _SHOWN else f"{path[:_SHOWN]}...")


def _check_digest(name: str, digest: tuple[int, str], file: File) -> None:
    if digest[0] != file.size:
        raise Damaged(f"{name} is damaged: it has {digest[0]} bytes instead of {file.size}")
    if digest[1] != file.sha256:
        raise Damaged(f"{name} is damaged: its SHA-256 differs")
