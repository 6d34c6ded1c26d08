"""Where `snapshots.to` leads: a folder, or a bucket."""

from __future__ import annotations

import re

from paceline.storage.folder import Folder
from paceline.storage.store import Store, StoreError

SCHEMES = ("s3", "gs", "az")
_BUCKET = re.compile(r"(s3|gs|az)://([^/]+)(/.*)?")


def open_store(to: str, patience: float | None = None) -> Store:
    """Nothing is asked of it yet. `patience`: seconds that one request may take with all its tries."""
    if to.startswith("/"):
        return Folder(to.rstrip("/") or "/")
    if not _BUCKET.fullmatch(to):
        raise StoreError(f"{to} is no place for snapshots: an absolute folder, or one of {', '.join(SCHEMES)} with ://")
    try:
        from paceline.storage.objects import Objects

        return Objects(to) if patience is None else Objects(to, patience)
    except ImportError as error:
        hint = "an image with obstore, or with Python 3.11 or newer and glibc, has or takes it"
        raise StoreError(f"{to} cannot be used here: obstore cannot be loaded ({error}); {hint}") from None
