"""Opens the store at a location: a folder, or a bucket."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.plan import BUCKETS, SCHEMES
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.protocol import Store, StoreError

if TYPE_CHECKING:
    from paceline.storage.stores.bucket import BucketStore

_BUCKET = re.compile(rf"({'|'.join(SCHEMES)})://([^/]+)(/.*)?")
_ADDRESSES = [f"{scheme}://BUCKET/PATH" for scheme in SCHEMES]
_EXAMPLES = f"{', '.join(_ADDRESSES[:-1])} or {_ADDRESSES[-1]}"
SETTINGS = ("AWS_", "GOOGLE_", "AZURE_")  # prefixes of the environment variables that configure access to a bucket


def split(address: str) -> tuple[str, str]:
    """Split an address into the bucket and the name in it.

    >>> split("s3://training/digits/raw/")
    ('s3://training', 'digits/raw/')
    """
    match = _BUCKET.fullmatch(address)
    if match is None:
        raise StoreError(f"{address} is not an address in a bucket", remedy=f"use {_EXAMPLES}")
    return f"{match[1]}://{match[2]}", (match[3] or "").lstrip("/")


def is_bucket(address: str) -> bool:
    return address.startswith(BUCKETS)


def listing(address: str) -> list[tuple[str, int, str]]:
    """The object at an address in a bucket, or all objects below it: name below the address, size and tag."""
    bucket, name = split(address)
    return open_bucket(bucket).listing(name)


def open_store(to: str, patience: float | None = None, settings: Mapping[str, str] | None = None) -> Store:
    """Sends no request yet. `patience`: seconds that one request may take with all retries. `settings`: variables that
    override those of the environment."""
    if to.startswith("/"):
        return FolderStore(to.rstrip("/") or "/")
    if not _BUCKET.fullmatch(to):
        raise StoreError(f"{to} is not a location for snapshots", remedy=f"use an absolute folder, {_EXAMPLES}")
    return open_bucket(to, patience, settings)


def open_bucket(to: str, patience: float | None = None, settings: Mapping[str, str] | None = None) -> BucketStore:
    try:
        from paceline.storage.stores.bucket import RETRY_S, BucketStore

        return BucketStore(to, RETRY_S if patience is None else patience, settings=settings)
    except ImportError as error:
        raise StoreError(
            f"cannot load obstore, the library for buckets: {error}",
            where=to,
            remedy="use an image that has obstore, or one with Python 3.11 or newer and glibc",
        ) from None
