"""Generates certificates early, in a separate process, while the job file is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

_generators: list[tuple[int, int]] = []  # pid and pipe of the process that generates them


def begin() -> None:
    """Start generating them in a child process, forked now because this process has imported very little so far."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(source)
            from paceline.backends import certificates

            os.write(sink, json.dumps(certificates.generate()).encode())
        finally:
            os._exit(0)
    os.close(sink)
    _generators.append((pid, source))


def finish(folder: Path) -> None:
    """Write them to `folder`; generate them now if `begin` was not called or failed."""
    from paceline.backends.private_files import write

    while _generators:
        pid, source = _generators.pop()
        with os.fdopen(source, "rb") as pipe:
            data = pipe.read()
        os.waitpid(pid, 0)
        if data:
            write(folder, json.loads(data))
            return
    from paceline.backends import certificates

    write(folder, certificates.generate())
