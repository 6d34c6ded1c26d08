"""Reads zip files that every reader understands in the same way, and rejects all others.

Readers of zip files disagree about files that are not plain: if two entries have the same name, Python's `zipfile`
returns the last one and torch the first one; some readers search for names without regard to case, some accept data in
front of or behind the archive. Someone could thus show one content to a check and another one to the program that loads
the file. Models need none of this.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections import Counter
from types import TracebackType
from typing import IO, Any, BinaryIO

_LOCAL = struct.Struct("<4s2xHH")  # signature, flags and compression method of an entry
_END = struct.Struct("<4s16xH")  # signature and length of the comment at the end of the archive
_FLAGS = 0x808  # sizes follow the data; names are UTF-8


class NotPlain(ValueError):
    """Readers could disagree about the contents of the archive; the message says why."""


class PlainZip:
    """A zip file with entries that are not compressed. Each entry is read from the file that was opened, once."""

    def __init__(self, path: Any) -> None:
        """`path`: or an open file. Raises NotPlain, or zipfile.BadZipFile if it is no zip file."""
        self._file: BinaryIO = path if hasattr(path, "read") else open(path, "rb")  # noqa: SIM115
        try:
            self._zip = zipfile.ZipFile(self._file)
            self._check(self._file.seek(0, os.SEEK_END))
        except OSError as error:  # the archive names positions that do not exist
            self._file.close()
            raise NotPlain(f"it is damaged: {error}") from error
        except BaseException:
            self._file.close()
            raise
        self.sizes = {each.filename: each.file_size for each in self._zip.infolist()}

    def __enter__(self) -> PlainZip:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()
        self._file.close()

    def open(self, name: str) -> IO[bytes]:
        return self._zip.open(name)

    def read(self, name: str, most: int) -> bytes:
        """`most`: the largest size that is accepted, in bytes."""
        if self.sizes[name] > most:
            raise NotPlain(f"{name} is too large: {self.sizes[name]} bytes, the limit is {most}")
        return self._zip.read(name)

    def _check(self, size: int) -> None:
        entries = self._zip.infolist()
        names = [each.filename for each in entries]
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise NotPlain(f"it contains {repeated[0]!r} twice")
        self._file.seek(-_END.size, os.SEEK_END)
        if _END.unpack(self._file.read(_END.size)) != (b"PK\5\6", 0):
            raise NotPlain("it contains data behind the archive")
        if min((each.header_offset for each in entries), default=0) > 0:
            raise NotPlain("it contains data in front of the archive")
        for each in entries:
            self._file.seek(each.header_offset)
            local = _LOCAL.unpack(self._file.read(_LOCAL.size))
            if local != (b"PK\3\4", each.flag_bits, each.compress_type) or each.orig_filename != each.filename:
                raise NotPlain(f"{each.filename!r} has two descriptions that differ")
            if each.compress_type != zipfile.ZIP_STORED or each.flag_bits & ~_FLAGS or each.is_dir():
                raise NotPlain(f"{each.filename!r} is compressed, encrypted or not a file")
        if sum(each.file_size for each in entries) > size:
            raise NotPlain("its entries overlap")
