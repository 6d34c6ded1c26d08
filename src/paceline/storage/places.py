"""Where `snapshots.to` leads: a folder, or a bucket."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paceline.storage.folder import Folder
from paceline.storage.store import Store, StoreError

if TYPE_CHECKING:
    from paceline.storage.objects import Objects

SCHEMES = ("s3", "gs", "az")
_BUCKET = re.compile(r"(s3|gs|az)://([^/]+)(/.*)?")


def split(address: str) -> tuple[str, str]:
    """The bucket, and the name in it.

    >>> split("s3://training/digits/raw/")
    ('s3://training', 'digits/raw/')
    """
    found = _BUCKET.fullmatch(address)
    if found is None:
        raise StoreError(f"{address} is no address in a bucket: it takes one of {', '.join(SCHEMES)} with ://")
    return f"{found[1]}://{found[2]}", (found[3] or "").lstrip("/")


def listing(address: str) -> list[tuple[str, int, str]]:
    """What is at an address in a bucket, a file or all below: names below it, each with its size and tag."""
    bucket, name = split(address)
    return open_bucket(bucket).listing(name)


def open_store(to: str, patience: float | None = None) -> Store:
    """Nothing is asked of it yet. `patience`: seconds that one request may take with all its tries."""
    if to.startswith("/"):
        return Folder(to.rstrip("/") or "/")
    if not _BUCKET.fullmatch(to):
        raise StoreError(f"{to} is no place for snapshots: an absolute folder, or one of {', '.join(SCHEMES)} with ://")
    return open_bucket(to, patience)


def open_bucket(to: str, patience: float | None = None) -> Objects:
    try:
        from paceline.storage.objects import Objects

        return Objects(to) if patience is None else Objects(to, patience)
    except ImportError as error:
        hint = "an image with obstore, or with Python 3.11 or newer and glibc, has or takes it"
        raise StoreError(f"{to} cannot be used here: obstore cannot be loaded ({error}); {hint}") from None
