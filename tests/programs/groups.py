"""Tasks of a group: in a real run, or as forks of one process, so that slow imports are done only once."""

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
    """`program FOLDER WORLD OPTIONS`: a task that succeeds writes its result to FOLDER/result-<rank>.json.

    In a run, `program OPTIONS`: the task prints its final state as its last line.
    """
    if "PACELINE_RUN" in os.environ:
        rank, world = (int(os.environ[f"PACELINE_{name}"]) for name in ("RANK", "WORLD_SIZE"))
        final_state = task(rank, world, None, json.loads(sys.argv[1]))["ended"]
        print(json.dumps({"ended": final_state}), flush=True)
        return
    folder, world, options = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _child(task, rank, world, folder, options)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


def _child(task: Callable[..., Any], rank: int, world: int, folder: Path, options: dict[str, Any]) -> None:
    code = 1
    try:
        os.environ.update(PACELINE_RANK=str(rank), PACELINE_WORLD_SIZE=str(world))
        os.environ["PACELINE_SNAPSHOT_DIR"] = str(folder / f"task-{rank}" / "snapshots")
        result = task(rank, world, folder, options)
        (folder / f"result-{rank}.json").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class WriteGate:
    """Blocks the snapshot thread when it creates its folder, while `go` is not set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.mkdir" and str(arguments[0]).endswith(".partial"):
            self.go.wait()
