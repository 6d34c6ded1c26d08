"""Profiles a captain: samples its stack with SIGPROF, and writes the functions that use the most CPU time when it gets
SIGUSR2. The captain handles SIGTERM itself."""

import collections
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from paceline.agent.captain_process import process
from paceline.agent.options import parse

EVERY = 0.002
path, options = sys.argv[1:]
inner: collections.Counter[str] = collections.Counter()
outer: collections.Counter[str] = collections.Counter()


def sample(_: int, frame: FrameType | None) -> None:
    seen: set[str] = set()
    while frame is not None:
        code = frame.f_code
        name = f"{Path(code.co_filename).name}:{getattr(code, 'co_qualname', code.co_name)}"
        if not seen:
            inner[f"{name}:{frame.f_lineno}"] += 1
        if name not in seen:
            outer[name] += 1
            seen.add(name)
        frame = frame.f_back


def write(*_: object) -> None:
    total = max(1, sum(inner.values()))
    with open(path, "w") as file:
        for title, counted in (("self", inner), ("including callees", outer)):
            file.write(f"{title}, of {total * EVERY:.1f} s CPU\n")
            for name, count in counted.most_common(25):
                file.write(f"  {100 * count / total:5.1f}%  {name}\n")
    os._exit(0)


signal.signal(signal.SIGPROF, sample)
signal.signal(signal.SIGUSR2, write)
signal.setitimer(signal.ITIMER_PROF, EVERY, EVERY)
process.main(parse(options))
