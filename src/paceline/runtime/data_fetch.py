"""Copies data from a bucket to this machine: once per host for all its tasks, and completely or not at all.

folder = paceline.fetch(os.environ["PACELINE_DATA"])  # s3://..., gs://..., az://...; a path is returned unchanged
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

from paceline.plan import BUCKETS

if TYPE_CHECKING:
    from paceline.storage.stores.bucket import BucketStore

PROGRESS_S = 30.0  # seconds between lines in the log, which also show the agent that the task does not hang
LIBRARY_S = 60.0  # time limit for obstore to be installed on a host
TRIES = 3  # if the data changes while it is copied
Listing = list[tuple[str, int, str]]  # names below the address, each with size and tag


class FetchError(OSError):
    """The data cannot be fetched; the text says which, and why."""


def fetch(address: str | os.PathLike[str]) -> Path:
    """Returns a local file or folder with the data at that address.

    A path is returned unchanged. The address of an object in a bucket gives a file, any other a folder with everything
    below it. Tasks of a host share the copy: the first one fetches it, the others wait. It does not change while the
    run exists, even when tasks restart. Outside a run, it is in ~/.cache/paceline/fetched.
    """
    text = os.fspath(address)
    if not text.startswith(BUCKETS):
        if "://" in text:
            raise FetchError(f"cannot fetch {text}: it must be a path, or begin with one of {', '.join(BUCKETS)}")
        if not os.path.exists(text):
            raise FetchError(f"cannot fetch {text}: no such file or folder")
        return Path(text)
    from paceline.storage.snapshots.manifest import Damaged, Newer
    from paceline.storage.stores.protocol import StoreError

    try:
        return _fetch(text)
    except (StoreError, Damaged, Newer) as error:
        raise FetchError(f"cannot fetch {text}: {error}") from None


def _fetch(address: str) -> Path:
    from paceline.storage.stores.locations import open_bucket, split

    bucket, name = split(address)
    _check_path(name.rstrip("/"), address)
    shared = os.environ.get("PACELINE_FETCHED_DIR")
    try:
        folder = Path(shared or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "paceline/fetched")).expanduser()
    except RuntimeError:
        raise FetchError(
            f"cannot fetch {address}: this user has no home folder for a copy; set XDG_CACHE_HOME"
        ) from None
    last = name.rstrip("/").rpartition("/")[2] or bucket.rpartition("/")[2]
    listing: Listing | None = None
    key = address.rstrip("/")
    if not shared:  # the data may change between two executions of the program
        _load_obstore()
        listing = open_bucket(bucket).listing(name)
        key += json.dumps(sorted(listing))
    own = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
    if (own / last).exists():
        return own / last
    own.mkdir(parents=True, exist_ok=True)
    with _lock(own / ".lock", address):
        if not (own / last).exists():
            _load_obstore()
            _copy(open_bucket(bucket), name, own / last, address, listing)
    return own / last


def _copy(store: BucketStore, name: str, target: Path, address: str, listing: Listing | None) -> None:
    for _ in range(TRIES):
        listing = store.listing(name) if listing is None else listing
        partial = target.with_name(f".{target.name[:100]}.{os.urandom(4).hex()}.partial")
        try:
            _copy_to(store, name, listing, partial, address)
            current = store.listing(name)
            if sorted(current) == sorted(listing):
                partial.rename(target)
                return
            listing = current
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            partial.unlink() if partial.is_file() else None
    raise FetchError(f"cannot fetch {address}: the data changed while it was copied, {TRIES} times")


def _copy_to(store: BucketStore, name: str, listing: Listing, partial: Path, address: str) -> None:
    from paceline.storage.ingested.dataset import MANIFEST, is_name, parse
    from paceline.storage.snapshots.manifest import MOST_BYTES, Damaged, Gone
    from paceline.storage.snapshots.repository import always
    from paceline.storage.stores.parallel import together

    prefix = f"{name.rstrip('/')}/".lstrip("/")
    is_file = [path for path, _, _ in listing] == [""]
    sizes = {path: size for path, size, _ in listing if not path.endswith("/")}  # empty objects that represent folders
    for path in sizes:
        _check_path(path, address)
    digests: dict[str, str] = {}
    if not sizes:
        raise FetchError(f"cannot fetch {address}: it does not exist or is empty")
    manifest = name.rstrip("/") + MANIFEST
    data = store.read(manifest, MOST_BYTES) if is_name(manifest.rpartition("/")[2][: -len(MANIFEST)]) else None
    if data is not None:  # written by an ingest: lists the files with their digests
        dataset = parse(data, manifest)
        sizes = {file.path: file.size for file in dataset.files}
        digests = {file.path: file.sha256 for file in dataset.files}
    _check_free_space(partial.parent, sum(sizes.values()), address)
    progress = _Progress(address, sum(sizes.values()))

    def fetch_file(path: str, is_wanted: Any) -> None:
        source = name if is_file else prefix + path
        target = partial if is_file else partial / path
        try:
            size, digest = store.fetch(source, str(target), lambda count: progress.add(count) and is_wanted(count))
        except KeyError:
            raise Gone(f"{source} was deleted") from None
        if size != sizes[path] or digest != digests.get(path, digest):
            raise Damaged(f"{source} is damaged: it does not match its {'manifest' if digests else 'listing'}")

    for parent in () if is_file else {os.path.dirname(path) for path in sizes}:
        (partial / parent).mkdir(parents=True, exist_ok=True)
    together(fetch_file, sizes, lambda path: store.at_once(sizes[path]), always)


def _check_path(path: str, address: str) -> None:
    """Raises if the path could lead out of the folder of the copy: a bucket allows any name. Empty: the folder itself,
    or the only object."""
    if path and any(step in ("", ".", "..") or "\0" in step for step in path.split("/")):
        text = f"{path!r} cannot be the path of a file: it has an empty part, '.', '..' or a null character"
        raise FetchError(f"cannot fetch {address}: {text}")


def _check_free_space(folder: Path, size: int, address: str) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        space = f"{size >> 20} MiB needed, {free >> 20} MiB free"
        raise FetchError(f"cannot fetch {address}: not enough space in {folder}: {space}")


class _Progress:
    def __init__(self, address: str, size: int) -> None:
        self._address, self._size = address, size
        self._fetched, self._last_line = 0, time.monotonic()
        self._lock = threading.Lock()

    def add(self, size: int) -> bool:
        with self._lock:
            self._fetched += size
            if time.monotonic() - self._last_line > PROGRESS_S:
                self._last_line = time.monotonic()
                _log(f"fetching {self._address}: {self._fetched >> 20} of {self._size >> 20} MiB")
        return True


@contextmanager
def _lock(path: Path, address: str) -> Iterator[None]:
    """One process of the host at a time; the kernel releases the lock of a process that dies."""
    with path.open("a+") as file:
        last_line = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            if time.monotonic() - last_line > PROGRESS_S:
                last_line = time.monotonic()
                file.seek(0)
                _log(f"waiting for {file.read(100) or 'another task'} to fetch {address}")
        file.truncate(0)
        file.write(os.environ.get("PACELINE_TASK") or f"process {os.getpid()}")
        file.flush()
        yield


def _load_obstore() -> None:
    """Loads the agent's obstore if this interpreter has none. Its folder does not stay on sys.path, as it may contain
    other packages."""
    from paceline.storage.stores import obstore_library

    if obstore_library.is_here():
        return
    folder = os.environ.get("PACELINE_OBSTORE", "")
    deadline = time.monotonic() + LIBRARY_S
    while folder and not os.path.isdir(folder):
        if time.monotonic() > deadline:
            raise FetchError(f"obstore, the library for buckets, was not installed on this host within {LIBRARY_S:g} s")
        time.sleep(0.1)
    original_path = list(sys.path)
    try:
        if folder:
            obstore_library.use(folder)
        import obstore.store  # noqa: F401
    except ImportError as error:
        remedy = "install obstore in the environment of the program"
        raise FetchError(f"cannot load obstore, the library for buckets ({error}); {remedy}") from None
    finally:
        sys.path[:] = original_path


def _log(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
