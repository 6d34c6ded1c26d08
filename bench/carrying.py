"""For bench scripts that have snapshots carried: a real porter, an S3 server, and s5cmd, which is fast with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import measure

sys.path.insert(0, str(measure.ROOT / "tests"))
sys.path.insert(0, str(measure.SOURCE))

from paceline.storage.manifest import File, Id, Manifest, Part
from support.stores import parts, servers

RUN = "bench-3f9a"
TASK = "worker-0"
S5CMD = Path(__file__).resolve().parent / "s5cmd"
no_bucket = parts.unmet


class Porter:
    """As an agent has it: a process of its own, asked over its pipes."""

    def __init__(self, place: str, env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline.agent.porter", json.dumps({"place": place, "run": RUN})],
            env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._asked = 0
        self.ask("begin", generation=1, parent=None, seen=[])

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self._asked += 1
        self.process.stdin.write(json.dumps({"id": self._asked, "do": do, **words}).encode() + b"\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise SystemExit(f"the porter cannot {do}: {answer['error']['text']}")
        return answer

    def send(self, folder: Path, step: int) -> list[list[Any]]:
        sent: list[list[Any]] = self.ask("send", snapshot=[step, 1], task=TASK, folder=str(folder))["files"]
        return sent

    def commit(self, files: list[list[Any]], step: int) -> None:
        made = Manifest(RUN, Id(step, 1), 1, (Part(TASK, tuple(File(*file) for file in files)),))
        self.ask("commit", manifest=made.to_bytes().decode())

    def fetch(self, folder: Path, step: int) -> None:
        self.ask("fetch", snapshot=[step, 1], folder=str(folder))

    def delete(self, step: int) -> None:
        self.ask("delete", snapshot=[step, 1])

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)


@contextmanager
def porter(place: str, env: Mapping[str, str]) -> Iterator[Porter]:
    started = Porter(place, env)
    try:
        yield started
    finally:
        started.close()


@contextmanager
def bucket(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """On a real server on this machine: its URL, and what clients find in their environment."""
    with servers.s3(folder) as store:
        yield store.url, store.options


def s5cmd() -> Path:
    """Built once a machine."""
    pins = [path.read_bytes() for path in sorted(S5CMD.iterdir())]
    command = ["go", "build", "-ldflags", "-s -w"]
    place = parts.cache() / "components" / f"s5cmd-{parts.key(*pins, *command, parts.GO_FLAGS)}"
    settings = {"CGO_ENABLED": "0", "GOFLAGS": parts.GO_FLAGS, "GOWORK": "off"}

    def make(partial: Path) -> None:
        measure.progress("building s5cmd ...")
        env = {**os.environ, **settings}
        subprocess.run(
            [*command, "-o", f"{partial}/", "tool"], cwd=S5CMD, env=env, stdin=subprocess.DEVNULL, check=True
        )

    return parts.made_once(place, make) / "s5cmd"
