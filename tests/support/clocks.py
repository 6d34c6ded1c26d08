"""Wall clocks that a test can set for the processes of its own runs.

A preloaded library (clock.c) gives agents, tasks, porters and the command line a false time, including calls made by
OpenSSL and obstore. The clock of the machine does not change.
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
        """Sets the clock to `hours` ahead of the machine's, with immediate effect.

        `process`: the name of one process; "all" applies to processes without a clock of their own.
        """
        partial = self._folder / "partial"
        partial.write_text(f"{hours * HOUR:.0f}")
        partial.rename(self._folder / process)
