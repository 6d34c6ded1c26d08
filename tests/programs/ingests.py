"""Creates data: words.txt of the code folder in upper case, and 2 more files. Files in the folder argv[1] make it wait
or fail; it records each start there.
"""

import os
import sys
import time
from pathlib import Path

state, folder = Path(sys.argv[1]), Path(os.environ["PACELINE_INGEST_DIR"])
assert not any(folder.iterdir()), "the folder to fill is not empty"
with (state / "made").open("a") as file:
    file.write(f"{os.getpid()}\n")
print("making", flush=True)
(folder / "half").write_text("half")
while (state / "wait").exists():
    time.sleep(0.02)
if (state / "fail").exists():
    raise ValueError("no such language")
(folder / "half").rename(folder / "whole")
(folder / "parts").mkdir()
(folder / "parts" / "words.txt").write_text(Path("words.txt").read_text().upper())
(folder / "large.bin").write_bytes(bytes(range(256)) * 40_000)
