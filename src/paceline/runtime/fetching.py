"""Data from a bucket as files of this machine: copied once a host, however many tasks ask for it, and never half.

folder = paceline.fetch(os.environ["PACELINE_DATA"])  # s3://..., gs://..., az://...; a path gives itself
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.storage.objects import Objects

BUCKETS = ("s3://", "gs://", "az://")
SAID_EVERY = 30.0  # seconds: who reads the log sees that it moves, and so does the agent
LIBRARY_S = 60.0  # for the library to come to a host
TRIES = 3  # where what is there changes meanwhile
Listed = list[tuple[str, int, str]]  # names below the address, each with size and tag


class FetchError(OSError):
    """It cannot be had; the text says what, and why not."""


def fetch(address: str | os.PathLike[str]) -> Path:
    """A file or folder of this machine with what is at that address.

    A path gives itself. Of a bucket, an address with such a file gives a file, and any other a folder with all that is
    below it. Tasks of a host share the copy: the first that asks fetches it, the others wait. It stays as it is for as
    long as the run is there, also when tasks start again; outside a run it is in ~/.cache/paceline/fetched.
    """
    text = os.fspath(address)
    if not text.startswith(BUCKETS):
        if "://" in text:
            raise FetchError(f"cannot fetch {text}: it is no path, and does not begin with one of {', '.join(BUCKETS)}")
        if not os.path.exists(text):
            raise FetchError(f"cannot fetch {text}: there is no such file or folder")
        return Path(text)
    from paceline.storage.manifest import Damaged, Newer
    from paceline.storage.store import StoreError

    try:
        return _fetch(text)
    except (StoreError, Damaged, Newer) as error:
        raise FetchError(f"cannot fetch {text}: {error}") from None


def _fetch(address: str) -> Path:
    from paceline.storage.places import open_bucket, split

    bucket, name = split(address)
    shared = os.environ.get("PACELINE_FETCHED_DIR")
    folder = Path(shared or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "paceline/fetched")).expanduser()
    last = name.rstrip("/").rpartition("/")[2] or bucket.rpartition("/")[2]
    listed: Listed | None = None
    key = address.rstrip("/")
    if not shared:  # another run of the program may find something else there
        _bring_library()
        listed = open_bucket(bucket).listing(name)
        key += json.dumps(sorted(listed))
    own = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
    if (own / last).exists():
        return own / last
    own.mkdir(parents=True, exist_ok=True)
    with _alone(own / ".lock", address):
        if not (own / last).exists():
            _bring_library()
            _copy(open_bucket(bucket), name, own / last, address, listed)
    return own / last


def _copy(store: Objects, name: str, target: Path, address: str, listed: Listed | None) -> None:
    for _ in range(TRIES):
        listed = store.listing(name) if listed is None else listed
        partial = target.with_name(f".{target.name[:100]}.{os.urandom(4).hex()}.partial")
        try:
            _copy_to(store, name, listed, partial, address)
            now = store.listing(name)
            if sorted(now) == sorted(listed):
                partial.rename(target)
                return
            listed = now
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            partial.unlink() if partial.is_file() else None
    raise FetchError(f"cannot fetch {address}: what is there changes while it is read")


def _copy_to(store: Objects, name: str, listed: Listed, partial: Path, address: str) -> None:
    from paceline.storage.data import MANIFEST, is_name, parse
    from paceline.storage.manifest import MOST_BYTES, Damaged, Gone
    from paceline.storage.snapshots import always
    from paceline.storage.together import together

    above = f"{name.rstrip('/')}/".lstrip("/")
    single = [path for path, _, _ in listed] == [""]
    sizes = {path: size for path, size, _ in listed if not path.endswith("/")}  # consoles make empty objects as folders
    digests: dict[str, str] = {}
    if not sizes:
        raise FetchError(f"cannot fetch {address}: there is nothing")
    manifest = name.rstrip("/") + MANIFEST
    data = store.read(manifest, MOST_BYTES) if is_name(manifest.rpartition("/")[2][: -len(MANIFEST)]) else None
    if data is not None:  # of an ingest: it says which files there are, and what is in them
        made = parse(data, manifest)
        sizes = {file.path: file.size for file in made.files}
        digests = {file.path: file.sha256 for file in made.files}
    _check_room(partial.parent, sum(sizes.values()), address)
    told = _Progress(address, sum(sizes.values()))

    def one(path: str, still: Any) -> None:
        there = name if single else above + path
        to = partial if single else partial / path
        try:
            found = store.fetch(there, str(to), lambda size: told.add(size) and still(size))
        except KeyError:
            raise Gone(f"{there} is gone") from None
        if found[0] != sizes[path] or found[1] != digests.get(path, found[1]):
            raise Damaged(f"{there} is damaged: it is not what its {'manifest' if digests else 'bucket'} says")

    for below in () if single else {os.path.dirname(path) for path in sizes}:
        (partial / below).mkdir(parents=True, exist_ok=True)
    together(one, sizes, lambda path: store.at_once(sizes[path]), always)


def _check_room(folder: Path, size: int, address: str) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise FetchError(f"cannot fetch {address}: it has {size >> 20} MiB, and {folder} has room for {free >> 20} MiB")


class _Progress:
    def __init__(self, address: str, size: int) -> None:
        self._address, self._size = address, size
        self._done, self._said = 0, time.monotonic()
        self._lock = threading.Lock()

    def add(self, size: int) -> bool:
        with self._lock:
            self._done += size
            if time.monotonic() - self._said > SAID_EVERY:
                self._said = time.monotonic()
                _say(f"fetching {self._address}: {self._done >> 20} of {self._size >> 20} MiB")
        return True


@contextmanager
def _alone(path: Path, address: str) -> Iterator[None]:
    """One process of the host at a time; the lock of one that dies is free."""
    with path.open("a+") as file:
        said = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            if time.monotonic() - said > SAID_EVERY:
                said = time.monotonic()
                file.seek(0)
                _say(f"waiting for {address}, which {file.read(100) or 'another task'} fetches")
        file.truncate(0)
        file.write(os.environ.get("PACELINE_TASK") or f"process {os.getpid()}")
        file.flush()
        yield


def _bring_library() -> None:
    """The agent's, where this interpreter has none; its folder may hold much else, so it is not left on the path."""
    from paceline.storage import library

    if library.is_here():
        return
    folder = os.environ.get("PACELINE_OBSTORE", "")
    until = time.monotonic() + LIBRARY_S
    while folder and not os.path.isdir(folder):
        if time.monotonic() > until:
            raise FetchError(f"obstore, which speaks to buckets, has not come to this host within {LIBRARY_S:g} s")
        time.sleep(0.1)
    before = list(sys.path)
    try:
        if folder:
            library.use(folder)
        import obstore.store  # noqa: F401
    except ImportError as error:
        hint = "install obstore where the program runs"
        raise FetchError(f"obstore, which speaks to buckets, cannot be loaded ({error}): {hint}") from None
    finally:
        sys.path[:] = before


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
