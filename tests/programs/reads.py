"""A task that reads its data, fetched first if it is in a bucket. It writes what it read to the folder in argv[1]."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import paceline

state, address = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else os.environ["PACELINE_DATA"]
data = paceline.fetch(address)
files = [data] if data.is_file() else sorted(path for path in data.rglob("*") if path.is_file())
digests = {str(path.relative_to(data)): hashlib.sha256(path.read_bytes()).hexdigest()[:8] for path in files}
inode = data.stat().st_ino
result = {"address": address, "data": str(data), "files": digests, "inode": inode, "path": sys.path}
name = f"{os.environ['PACELINE_TASK']}-g{os.environ['PACELINE_GENERATION']}"
(state / f"{name}.partial").write_text(json.dumps(result))
(state / f"{name}.partial").rename(state / f"{name}.json")
if (state / "die").exists() and os.environ["PACELINE_TASK"] == "worker-1":
    (state / "die").unlink()
    os.kill(os.getpid(), signal.SIGKILL)
