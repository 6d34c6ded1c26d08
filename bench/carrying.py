"""For bench scripts that transfer snapshots: a real porter, an S3 server, and s5cmd, a fast S3 client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import measure

sys.path.insert(0, str(measure.ROOT / "tests"))
sys.path.insert(0, str(measure.SOURCE))

from paceline.agent.transfers import requests as req
from paceline.storage.snapshots.manifest import File, Manifest, Part, SnapshotId
from support.stores import parts, servers

RUN = "bench-3f9a"
TASK = "worker-0"
S5CMD = Path(__file__).resolve().parent / "s5cmd"
no_bucket = parts.unmet


class Porter:
    """A porter process, controlled through its pipes as an agent does."""

    def __init__(self, location: str, env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline.agent.transfers.porter", json.dumps({"place": location, "run": RUN})],
            env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._request_count = 0
        self.call(req.BeginGeneration(1, None))

    def call(self, request: req.Request) -> req.Answer:
        assert self.process.stdin and self.process.stdout
        self._request_count += 1
        data = {"id": self._request_count, **req.request_to_object(request)}
        self.process.stdin.write(json.dumps(data).encode() + b"\n")
        self.process.stdin.flush()
        received = json.loads(self.process.stdout.readline())
        answer = req.read_answer({name: value for name, value in received.items() if name != "id"})
        if isinstance(answer, req.Failure):
            raise SystemExit(f"the porter failed: {type(request).__name__}: {answer.text}")
        return answer

    def send(self, folder: Path, step: int) -> tuple[File, ...]:
        answer = self.call(req.SendPart(SnapshotId(step, 1), TASK, str(folder)))
        assert isinstance(answer, req.PartSent)
        return answer.files

    def commit(self, files: tuple[File, ...], step: int) -> None:
        manifest = Manifest(RUN, SnapshotId(step, 1), 1, (Part(TASK, files),))
        self.call(req.CommitSnapshot(manifest.id, manifest.to_bytes().decode()))

    def fetch(self, folder: Path, step: int) -> None:
        self.call(req.FetchSnapshot(SnapshotId(step, 1), str(folder)))

    def delete(self, step: int) -> None:
        self.call(req.DeleteSnapshot(SnapshotId(step, 1), 1))

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)


@contextmanager
def porter(location: str, env: Mapping[str, str]) -> Iterator[Porter]:
    started = Porter(location, env)
    try:
        yield started
    finally:
        started.close()


@contextmanager
def bucket(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A bucket on a real server on this machine: its URL, and environment variables for clients."""
    with servers.s3(folder) as store:
        yield store.url, store.options


def s5cmd() -> Path:
    """The program, built once per machine."""
    pins = [path.read_bytes() for path in sorted(S5CMD.iterdir())]
    command = ["go", "build", "-ldflags", "-s -w"]
    folder = parts.cache() / "components" / f"s5cmd-{parts.key(*pins, *command, parts.GO_FLAGS)}"
    settings = {"CGO_ENABLED": "0", "GOFLAGS": parts.GO_FLAGS, "GOWORK": "off"}

    def build(partial: Path) -> None:
        measure.progress("building s5cmd ...")
        env = {**os.environ, **settings}
        subprocess.run(
            [*command, "-o", f"{partial}/", "tool"], cwd=S5CMD, env=env, stdin=subprocess.DEVNULL, check=True
        )

    return parts.made_once(folder, build) / "s5cmd"
