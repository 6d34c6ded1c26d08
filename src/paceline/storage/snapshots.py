"""The snapshots of one run at one place: parts first, the manifest last. Without its manifest, none exists."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.storage import chain, curves, evaluation, kept, manifest
from paceline.storage.chain import Record
from paceline.storage.evaluation import Evaluation
from paceline.storage.files import copy
from paceline.storage.manifest import Damaged, File, Gone, Id, Manifest, Part, fit
from paceline.storage.store import Sent, Store, StoreError, Wanted
from paceline.storage.together import together

MANIFEST = "manifest.json"
_RECORD_BYTES = 64 * 1024


class Superseded(Exception):
    """Another captain has begun this generation, or a later one."""


class Unfit(Exception):
    """A folder that a task wrote cannot be a snapshot; the text names the file."""


def always(_: int) -> bool:
    return True


def taken(place: str, run: str) -> str:
    """Why no other run can have that id there."""
    where = f"{place.rstrip('/')}/{run}"
    return (
        f"there is another run {run} at {place}: choose another id (--run), start from that one "
        f"(--set snapshots.from={where}), or delete it (`paceline delete --snapshots {where}`)"
    )


@dataclass(frozen=True)
class Known:
    """What is at the place."""

    records: dict[int, Record]
    committed: frozenset[Id]

    @property
    def generation(self) -> int:
        return max(self.records, default=0)

    def counted(self) -> list[Id]:
        """Newest first."""
        return chain.counted(self.records, self.committed)


class Snapshots:
    def __init__(self, store: Store, run: str, token: str = "", place: str = "") -> None:
        """`token`: of the run that writes there; another of the same id has another. `place`: what people call it."""
        self._store = store
        self.run = run
        self._token, self._place = token, place
        self._records: dict[str, Record] = {}  # they never change
        self._sending: Id | None = None  # the last that was sent,
        self._sent: dict[str, Sent] = {}  # and by task what was sent before it failed

    # ---- what there is

    def known(self) -> Known:
        self.claim()
        for name in self._store.names(f"{self.run}/generations/"):
            if name not in self._records and (data := self._store.read(name, _RECORD_BYTES)) is not None:
                self._records[name] = chain.parse(data, name)  # without it nobody can tell what counts: no guess
        records = {record.generation: record for record in self._records.values() if record.generation}
        found = filter(None, map(manifest.parse_id, self._store.folders(f"{self.run}/")))
        return Known(records, frozenset(id for id in found if self.has(id)))

    def manifest(self, id: Id) -> Manifest:
        name = self._manifest(id)
        data = self._store.read(name, manifest.MOST_BYTES)
        if data is None:
            raise Gone(f"{name} is gone")
        found = manifest.parse(data, name)
        if (found.run, found.id) != (self.run, id):
            raise Damaged(f"{name} is that of another snapshot: {found.run} {found.id}")
        return found

    def has(self, id: Id) -> bool:
        return self._store.has(self._manifest(id))

    def taken(self) -> bool:
        """Whether a run of this id has been there. Parts of a snapshot alone are nothing: a member may have sent them
        to a place that was lost with its captain, and is made anew."""
        if self._store.names(f"{self.run}/generations/"):
            return True
        return any(map(self.has, filter(None, map(manifest.parse_id, self._store.folders(f"{self.run}/")))))

    def claim(self) -> None:
        """Before the run writes anything: two runs of one id would go on from each other's snapshots, and delete them.
        Its own captains, each of which has its token, come back as often as they like."""
        if not self._token:
            return
        name = self._record(0)
        data = self._store.read(name, _RECORD_BYTES)
        if data is None:
            if not self.taken():
                self._store.create(name, Record(0, None, self._token).to_bytes())
            data = self._store.read(name, _RECORD_BYTES)  # of whoever was first
        if data is None or chain.parse(data, name).by != self._token:
            raise StoreError(taken(self._place, self.run))

    # ---- a generation begins

    def begin(self, generation: int, parent: Id | None, seen: Iterable[Id] = (), by: str = "") -> list[Id]:
        """Before anything of it is committed. `seen`: what was there when the parent was chosen. `by`: which captain;
        it may ask again where it has no answer.

        Where more that counts has been committed since then, what counted until now is returned, newest first: whoever
        wrote it may have been told so, before this record could tell it that it is late. The caller begins one
        generation more, from the newest of these.
        """
        self.claim()
        self._still_newest(generation)
        name, data = self._record(generation), Record(generation, parent, by or os.urandom(8).hex()).to_bytes()
        if not self._store.create(name, data) and self._store.read(name, _RECORD_BYTES) != data:
            raise Superseded(f"generation {generation} has been begun by another captain")
        known = self.known()
        before = {number: each for number, each in known.records.items() if number != generation}
        counted, before_it = chain.counted(before, known.committed), set(seen)
        return counted if any(each not in before_it for each in counted) else []

    def _still_newest(self, generation: int) -> None:
        known = self._store.names(f"{self.run}/generations/")
        if known and known[-1] > self._record(generation):
            raise Superseded(f"there is a later generation than {generation}: {known[-1]}")

    # ---- commit

    def send(self, id: Id, task: str, folder: str, wanted: Wanted = always) -> Part:
        """What a task wrote, as a part of that snapshot. Files that are there already are replaced: the same task of
        the same generation wrote them."""
        if id != self._sending:
            self._sending, self._sent = id, {}
        names = {path: self._file(id, task, path) for path in sorted(files_of(folder))}
        _room_for(len(names), sum(map(len, names)) + manifest.FILE_BYTES * len(names))
        sent = self._sent.setdefault(task, {})
        self._store.send_all([(f"{folder}/{path}", name) for path, name in names.items()], wanted, sent)
        del self._sent[task]  # whoever asks once more has lost it there
        return Part(task, tuple(File(path, *sent[name]) for path, name in names.items()))

    def commit(self, made: Manifest) -> bool:
        """False: it was committed before. Superseded: it is there, but nobody may count on it."""
        new = self.create(made)
        self._still_newest(made.id.generation)
        return new

    def create(self, made: Manifest) -> bool:
        data = made.to_bytes()
        _room_for(sum(len(part.files) for part in made.parts), len(data))
        return self._store.create(self._manifest(made.id), data)

    # ---- evaluation

    def evaluate(self, id: Id, told: Evaluation) -> Evaluation:
        """What counts from now on: of two evaluations of a snapshot, the first. Gone: it was deleted meanwhile."""
        if not self.has(id):
            raise Gone(f"{self._manifest(id)} is gone")
        name = f"{self.run}/{id}/{evaluation.NAME}"
        return told if self._store.create(name, told.to_bytes()) else self.evaluation(id) or told

    def evaluation(self, id: Id) -> Evaluation | None:
        """None: it has not been evaluated, or nobody can read what came of it."""
        name = f"{self.run}/{id}/{evaluation.NAME}"
        data = self._store.read(name, evaluation.MOST_BYTES)
        try:
            return None if data is None else evaluation.parse(data, name)
        except (Damaged, manifest.Newer):
            return None

    # ---- restore

    def fetch(self, wanted: Manifest, folder: str, still: Wanted = always, held: str = "") -> int:
        """Into a new folder, under its own name only when all of it was verified. The number of bytes that came.

        `held`: a folder with `<task>/<snapshot>/<path>`, where a file need not be fetched if it is what was committed.
        """
        above, name = os.path.split(folder)
        partial = f"{above}/.{name}.{os.urandom(4).hex()}.partial"
        files = wanted.files()

        def one(each: tuple[str, tuple[str, File]], still: Wanted) -> int:
            path, (task, file) = each
            target = f"{partial}/{path}"
            if held and _copied(f"{held}/{task}/{wanted.id}/{path}", file, target, still):
                return 0
            self._fetch_file(self._file(wanted.id, task, path), file, target, still)
            return file.size

        try:
            for below in {"", *map(os.path.dirname, files)}:
                os.makedirs(f"{partial}/{below}", exist_ok=True)
            came = sum(together(one, files.items(), lambda each: self._store.at_once(each[1][1].size), still))
            os.rename(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return came

    def _fetch_file(self, name: str, file: File, target: str, still: Wanted) -> None:
        try:
            found = self._store.fetch(name, target, still)
        except KeyError:
            raise Gone(f"{name} is gone") from None
        _check(name, found, file)

    def check(self, id: Id, task: str, file: File, still: Wanted = always) -> None:
        """Reads every byte of that file at the place; Damaged where it is not what was committed."""
        name = self._file(id, task, file.path)
        try:
            found = self._store.digest(name, still)
        except KeyError:
            raise Gone(f"{name} is gone") from None
        _check(name, found, file)

    # ---- retention

    def delete(self, id: Id) -> None:
        """The manifest first: from then on it does not exist."""
        self._store.delete(self._manifest(id))
        self._store.clear(f"{self.run}/{id}/")

    def sweep(self, generation: int) -> None:
        """What generations before this one, which has its record, did not commit or not wholly delete: nobody will."""
        for id in filter(None, map(manifest.parse_id, self._store.folders(f"{self.run}/"))):
            if id.generation < generation and not self.has(id):
                self._store.clear(f"{self.run}/{id}/")

    def delete_all(self) -> None:
        """All of the run, also what it wrote besides, and nothing else: first every manifest, last the records, which
        tell what counts."""
        ids = list(filter(None, map(manifest.parse_id, self._store.folders(f"{self.run}/"))))
        for id in ids:
            self._store.delete(self._manifest(id))
        for id in ids:
            self.delete(id)
        self._store.clear(f"{self.run}/{kept.FOLDER}/")
        self._store.clear(f"{self.run}/{curves.FOLDER}/")
        self._store.clear(f"{self.run}/generations/")

    def _record(self, generation: int) -> str:
        return f"{self.run}/generations/{generation:08d}.json"

    def _manifest(self, id: Id) -> str:
        return f"{self.run}/{id}/{MANIFEST}"

    def _file(self, id: Id, task: str, path: str) -> str:
        return f"{self.run}/{id}/{task}/{path}"


def _room_for(files: int, size: int) -> None:
    """`size`: what they take in a manifest."""
    if size > manifest.MOST_BYTES:
        most = f"{manifest.MOST_BYTES >> 20} MiB, room for about 400,000"
        raise Unfit(f"its {files} files take {-(-size >> 20)} MiB in a manifest, which may have {most}")


def _copied(source: str, file: File, target: str, still: Wanted) -> bool:
    """Whether that file is here, and as it was committed."""
    try:
        if copy(source, target, still, sync=False) == (file.size, file.sha256):
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
                if not fit(path):
                    raise Unfit(f"{path!r} cannot be the path of a file in {what}")
                if stat.S_ISDIR(mode):
                    folders.append(f"{path}/")
                elif stat.S_ISREG(mode):
                    yield path
                else:
                    raise Unfit(f"{path!r} is no file: {what} holds files and folders")


def _check(name: str, found: tuple[int, str], file: File) -> None:
    if found != (file.size, file.sha256):
        raise Damaged(f"{name} is damaged: {_differs(found, file)}")


def _differs(found: tuple[int, str], file: File) -> str:
    if found[0] != file.size:
        return f"it has {found[0]} bytes instead of {file.size}"
    return "its digest is another"
