"""Opens files that others may have replaced by something else. A small module: every command imports it."""

from __future__ import annotations

import errno
import os
import stat


def open_regular(path: str, follow: bool = False) -> int:
    """Open a file that others may have replaced: never waits, as it would for a pipe, and reads no device.

    `follow`: symbolic links are followed.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd
