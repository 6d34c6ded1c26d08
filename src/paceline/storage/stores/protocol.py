"""The protocol of stores. Names are paths with slashes; a named object contains all of its data or does not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Protocol

from paceline.errors import PacelineError, Text

PIECE = 8 * 1024 * 1024  # bytes that are read, sent or fetched at a time
Sent = dict[str, tuple[int, str]]  # name -> size and SHA-256 of the bytes that were sent
ContinueCheck = Callable[[int], bool]  # called with the size of the next piece; False cancels the transfer


class StoreError(PacelineError):
    """A store failed or refused; the text names the store, the operation and the reason."""

    def __init__(
        self, what: str, is_transient: bool = False, *, reason: str = "", where: Text = "", remedy: Text = ""
    ) -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.is_transient = is_transient  # a retry may succeed
        self.reason = reason  # without the name of the object, so the same on all hosts; empty: see the text


class TransferCanceled(Exception):
    """The caller no longer needs the transfer."""


class Store(Protocol):
    def create(self, name: str, data: bytes) -> bool:
        """False if the name already exists; nothing has changed then."""

    def read(self, name: str, most: int) -> bytes | None:
        """None if the name does not exist. StoreError if it has more than `most` bytes."""

    def has(self, name: str) -> bool: ...

    def folders(self, prefix: str) -> list[str]:
        """The next path component of names below `prefix`, sorted. A prefix ends in a slash."""

    def names(self, prefix: str) -> list[str]:
        """All names that start with `prefix`, sorted."""

    def delete(self, name: str) -> None:
        """Deleting a name that does not exist is not an error."""

    def clear(self, prefix: str) -> None:
        """Delete all names below `prefix`, and what a crash has left there. A prefix ends in a slash."""

    def send_all(self, files: Sequence[tuple[str, str]], should_continue: ContinueCheck, sent: Sent) -> None:
        """Send local files, given as (path, name); when it returns, they survive a crash. `sent` is updated even if a
        file fails; files that an earlier attempt has added to it need not be sent again."""

    def digest(self, name: str, should_continue: ContinueCheck) -> tuple[int, str]:
        """Read all bytes in the store; return their size and SHA-256. KeyError: the name does not exist."""

    def at_once(self, size: int) -> int:
        """How many files of about this size to fetch in parallel."""

    def fetch(self, name: str, path: str, should_continue: ContinueCheck) -> tuple[int, str]:
        """Fetch into a new local file; return its size and SHA-256. KeyError: the name does not exist."""
