"""Opens files that others may have replaced by something else. A small module: every command imports it."""

from __future__ import annotations

import errno
import os
import stat

_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


def open_regular(path: str, follow: bool = False) -> int:
    """Open a file that others may have replaced: never waits, as it would for a pipe, and reads no device.

    `follow`: symbolic links are followed.
    """
    return _checked(os.open(path, os.O_RDONLY | _FLAGS | (0 if follow else os.O_NOFOLLOW)), path)


def append_to_regular(path: str) -> int:
    """The same for a file to append to, which is created if it does not exist."""
    return _checked(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _FLAGS, 0o600), path)


def _checked(fd: int, path: str) -> int:
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd
