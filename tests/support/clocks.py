"""Clocks on the wall that a test may set, of the processes of its runs alone.

A library that is loaded before all others (clock.c) lies to agents, tasks, those that carry snapshots and the command
line, also where OpenSSL or obstore asks; the clock of the machine stays as it is.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

HOUR = 3600


class Clocks:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "clocks"
        self._folder.mkdir()
        library = folder / "clock.so"
        source = Path(__file__).with_name("clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
        self.env = {"LD_PRELOAD": str(library), "TEST_CLOCKS": str(self._folder)}

    def set(self, hours: float, process: str = "all") -> None:
        """So many hours ahead of the machine's, at once; `process`: by its name, else those that have none of their
        own."""
        partial = self._folder / "partial"
        partial.write_text(f"{hours * HOUR:.0f}")
        partial.rename(self._folder / process)
