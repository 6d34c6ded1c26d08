"""Tasks of a group: of a real run, or forks of one process, so that what takes long to import is imported once."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run(task: Callable[[int, int, Path | None, dict[str, Any]], Any]) -> None:
    """`program PLACE WORLD OPTIONS`: what a task returns is in PLACE/result-<rank>.json, once it has ended well.

    In a run, `program OPTIONS`: how it ended is its last line.
    """
    if "PACELINE_RUN" in os.environ:
        rank, world = (int(os.environ[f"PACELINE_{name}"]) for name in ("RANK", "WORLD_SIZE"))
        ended = task(rank, world, None, json.loads(sys.argv[1]))["ended"]
        print(json.dumps({"ended": ended}), flush=True)
        return
    place, world, options = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _child(task, rank, world, place, options)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


def _child(task: Callable[..., Any], rank: int, world: int, place: Path, options: dict[str, Any]) -> None:
    code = 1
    try:
        os.environ.update(PACELINE_RANK=str(rank), PACELINE_WORLD_SIZE=str(world))
        os.environ["PACELINE_SNAPSHOT_DIR"] = str(place / f"task-{rank}" / "snapshots")
        result = task(rank, world, place, options)
        (place / f"result-{rank}.json").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Held:
    """Holds up what the thread of snapshots does, at its first call to the system, until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.mkdir" and str(arguments[0]).endswith(".partial"):
            self.go.wait()
