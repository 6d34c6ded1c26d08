"""What a place for snapshots must be able to do. Names are paths with slashes; a name holds all of its data or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Protocol

PIECE = 8 * 1024 * 1024  # bytes that are read, sent or fetched at once
Sent = dict[str, tuple[int, str]]  # name -> size and SHA-256, of the bytes that were sent
Wanted = Callable[[int], bool]  # asked with the bytes of the next piece: whether the transfer is still wanted


class StoreError(Exception):
    """The place cannot be used as asked; the text says which place, what was tried and why not."""

    def __init__(self, text: str, passing: bool = False) -> None:
        super().__init__(text)
        self.passing = passing  # it may help to try again


class Unwanted(Exception):
    """A transfer was given up because something newer has come."""


class Store(Protocol):
    def create(self, name: str, data: bytes) -> bool:
        """False where the name is taken; then nothing has changed."""

    def read(self, name: str, most: int) -> bytes | None:
        """None where there is no such name."""

    def has(self, name: str) -> bool: ...

    def folders(self, prefix: str) -> list[str]:
        """What comes next in names that begin with `prefix`, up to a slash, sorted. A prefix ends in a slash."""

    def names(self, prefix: str) -> list[str]:
        """All names that begin with `prefix`, sorted."""

    def delete(self, name: str) -> None:
        """A name that is not there is no error."""

    def clear(self, prefix: str) -> None:
        """All that has such a name, and what a crash has left there. A prefix ends in a slash."""

    def send_all(self, files: Sequence[tuple[str, str]], wanted: Wanted, sent: Sent) -> None:
        """Files of this machine, each with its name there; no crash takes them any more. `sent` says how it went, also
        where it failed; what an earlier try has put into it need not be sent again."""

    def digest(self, name: str, wanted: Wanted) -> tuple[int, str]:
        """Its size and SHA-256, of every byte as it is there now. KeyError: there is none."""

    def at_once(self, size: int) -> int:
        """How many files of about this size are best fetched at the same time."""

    def fetch(self, name: str, path: str, wanted: Wanted) -> tuple[int, str]:
        """Into a new file of this machine; its size and SHA-256, of the bytes that came. KeyError: there is none."""
