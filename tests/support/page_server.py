"""`paceline page` as a process, and a client that has signed in; and folders of runs with many tasks or lines."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import httpx2

from support import recorded
from support.runs import eventually

LIMIT_S = 90.0  # longer than the limits of the server


class PageServer:
    def __init__(self, home: Path, *options: str, env: dict[str, str] | None = None, **popen: Any) -> None:
        environment = {**recorded.environment(home), "KUBECONFIG": str(home / "no-kubeconfig"), **(env or {})}
        self._errors = (home / "page.err").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.cli", "page", "--port", "0", *options], env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors, text=True, **popen,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, self.said()
        self.url = self.address.partition("?")[0]
        self.origin = "/".join(self.url.split("/")[:3])
        self.port = int(self.origin.rpartition(":")[2])

    def said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    @contextlib.contextmanager
    def client(self, sign_in: bool = True) -> Iterator[httpx2.Client]:
        with httpx2.Client(base_url=self.url, headers={"origin": self.origin}, timeout=LIMIT_S) as client:
            if sign_in:
                assert client.get(self.address).status_code == 303
            yield client

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


@contextlib.contextmanager
def page_server(home: Path, *options: str, env: dict[str, str] | None = None, **popen: Any) -> Iterator[PageServer]:
    server = PageServer(home, *options, env=env, **popen)
    try:
        yield server
    finally:
        server.stop()


class EventSource:
    """Server-sent events, read by a thread."""

    def __init__(self, client: httpx2.Client, path: str) -> None:
        self._client, self._path = client, path
        self._events: Queue[tuple[str, Any]] = Queue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(httpx2.HTTPError), self._client.stream("GET", self._path, timeout=None) as response:
            name = ""
            for line in response.iter_lines():
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    self._events.put((name, json.loads(line[6:])))
                if self._stopping.is_set():
                    return

    def wait(self, name: str, check: Any = lambda data: True) -> Any:
        """The first event of that name with data that passes the check; those before it are dropped."""
        return self._wait(lambda event: event[0] == name and bool(check(event[1])), lambda: f"the event {name}")

    def _wait(self, is_wanted: Callable[[tuple[str, Any]], bool], describe: Callable[[], str]) -> Any:
        seen: list[str] = []

        def find() -> list[Any]:
            with contextlib.suppress(Empty):
                while True:
                    event = self._events.get_nowait()
                    seen.append(f"{event[0]} {str(event[1])[:200]}")
                    if is_wanted(event):
                        return [event[1]]
            return []

        [data] = eventually("events of the page", find, more=lambda: "\n".join([describe(), *seen[-20:]]))
        return data

    def wait_for_all(self, *wanted: tuple[str, Any]) -> None:
        """Until there was an event for each name and check, in any order: what is new at the same time comes in the
        order of its names."""
        missing = list(wanted)

        def is_wanted(event: tuple[str, Any]) -> bool:
            missing[:] = [(name, check) for name, check in missing if not (event[0] == name and check(event[1]))]
            return not missing

        self._wait(is_wanted, lambda: f"the events {', '.join(name for name, _ in missing)}")

    def stop(self) -> None:
        self._stopping.set()


def many_tasks(home: Path, tasks: int, run: str = "large-1000") -> Path:
    """The folder of a run with many tasks, all of which have restarted once and report steps."""
    names = [f"worker-{number}" for number in range(tasks)]
    hosts = [f"worker-host-{number}" for number in range(tasks)]
    events = [
        recorded.event(
            0, "run-started", 0, run=run, job="large", framework="none", strategy="", tasks=names, hosts=hosts
        ),
        *(recorded.event(1, "member-joined", 0, host=host) for host in hosts),
    ]
    for generation, begin in ((1, 2.0), (2, 20.0)):
        events.append(recorded.event(begin, "generation-formed", generation, tasks=names, restore=None))
        for name, host in zip(names, hosts, strict=True):
            start = {"task": name, "pid": 1, "warm": False, "host": host}
            events.append(recorded.event(begin + 1, "task-started", generation, **start))
            step = {"task": name, "step": 5, "metrics": {"loss": 0.5}, "steps_per_s": 1.0}
            events.append(recorded.event(begin + 5, "step", generation, **step))
        if generation == 1:
            exits = {"code": None, "signal": "SIGKILL"}
            restart = {"cause": "signal", "task": "worker-0", "detail": "killed", "scope": names, "delay_s": 0.0}
            events.append(recorded.event(15, "task-exited", 1, task="worker-0", **exits, expected=False))
            events.append(recorded.event(15, "restart", 1, **restart, count=1, limit=10))
            events += [recorded.event(16, "task-exited", 1, task=name, **exits, expected=True) for name in names[1:]]
    events.append(recorded.event(30, "note", 2, text="this goes on"))
    folder = recorded.write(home, run, events=events)
    plan = {"tasks": [{"name": name, "host": host} for name, host in zip(names, hosts, strict=True)]}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def many_lines(path: Path, count: int) -> None:
    """A log with numbered lines."""
    with path.open("w") as file:
        for begin in range(0, count, 1000):
            head, numbers = f"{recorded.at(begin / count * 59)} g1 |", range(begin, min(begin + 1000, count))
            file.write("".join([f"{head} line {number} of {count}\n" for number in numbers]))


def memory(pid: int) -> int:
    """Bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
