"""Model servers under test: exported models, a server as a process, requests to it, and load by wrk."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.lab.components import wrk
from support.runs import SOURCE, eventually

START_S = 120.0
# POSTs one body again and again, and says how often each answer came. Requests have their times, one every so many ms:
# those that a slow answer has held up are made up for, so that the rate is the one that is stated.
_LUA = """
local ffi = require("ffi")
ffi.cdef("typedef struct { long s; long ns; } moment; int clock_gettime(int clock, moment *now);")
local moment = ffi.new("moment[1]")
local function now()
  ffi.C.clock_gettime(1, moment)
  return tonumber(moment[0].s) * 1000 + tonumber(moment[0].ns) / 1e6
end
local body, pause = os.getenv("BODY"), tonumber(os.getenv("PAUSE_MS"))
local due = now()
wrk.method = "POST"
wrk.body = body
wrk.headers["Content-Type"] = "application/json"
seen = ""
local counts = {}
function delay()
  due = due + pause
  return math.max(0, due - now())
end
function response(status, headers, answer)
  local key = status .. " " .. answer
  counts[key] = (counts[key] or 0) + 1
  local parts = {}
  for each, n in pairs(counts) do parts[#parts + 1] = n .. " " .. each end
  seen = table.concat(parts, "\\n")
end
local threads = {}
function setup(thread) table.insert(threads, thread) end
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("ERRORS %d %d %d %d\\n", e.connect, e.read, e.write, e.timeout))
  for _, thread in ipairs(threads) do io.write("SEEN\\n" .. thread:get("seen") .. "\\n") end
end
"""


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any


@dataclass(frozen=True)
class Server:
    address: str  # of the model
    process: subprocess.Popen[str]
    log: Path

    @property
    def root(self) -> str:
        return self.address.partition("/v1/")[0]

    def get(self, path: str = "") -> Answer:
        return _ask(urllib.request.Request(self.address + path))

    def predict(self, body: Any, path: str = "") -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return _ask(urllib.request.Request(f"{self.address}{path}:predict", data=data))


def _ask(request: urllib.request.Request) -> Answer:
    try:
        with urllib.request.urlopen(request, timeout=60) as got:
            return Answer(got.status, _read(got.read()))
    except urllib.error.HTTPError as error:
        return Answer(error.code, _read(error.read()))


def _read(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()


def serving(base: Path, *options: str) -> contextlib.AbstractContextManager[Server]:
    """The versions in a folder."""
    words = ["-m", "paceline.serve", "--base", str(base), "--name", "toy", "--port", "0", "--leave-after", "0"]
    return started([sys.executable, *words, *options], base.parent / f"{base.name}.log", {})


@contextlib.contextmanager
def started(command: list[str], log: Path, more: Mapping[str, str], folder: Path | None = None) -> Iterator[Server]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TF_CPP_MIN_LOG_LEVEL": "3", **more}
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=folder
        )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address.endswith(":predict"), log.read_text()
        yield Server(address.removesuffix(":predict"), process, log)
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def answers(server: Server, version: int) -> None:
    """Waits until that version answers."""
    eventually(
        f"version {version} answers",
        lambda: server.get(f"/versions/{version}").status == 200,
        START_S,
        lambda: server.log.read_text(),
    )


@dataclass(frozen=True)
class Load:
    process: subprocess.Popen[str]

    def result(self) -> tuple[int, dict[str, int]]:
        """Requests that got no answer, and how often each answer (status and body) came."""
        out, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, out
        found = re.search(r"ERRORS (\d+) (\d+) (\d+) (\d+)", out)
        assert found, out
        seen: dict[str, int] = {}
        for line in out.partition("SEEN\n")[2].splitlines():
            count, _, answer = line.partition(" ")
            if count.isdecimal():
                seen[answer] = seen.get(answer, 0) + int(count)
        return sum(map(int, found.groups())), seen


@contextlib.contextmanager
def load(server: Server, body: Any, clients: int, rate: float, seconds: float, folder: Path) -> Iterator[Load]:
    """`rate`: requests a second of all clients together."""
    script = folder / "load.lua"
    script.write_text(_LUA)
    program = wrk()
    settings = {
        **os.environ,
        "BODY": json.dumps(body),
        "PAUSE_MS": str(1000 / rate),
        "LD_LIBRARY_PATH": str(program.parents[2] / "usr/lib/x86_64-linux-gnu"),
    }
    words = [str(program), "-t", "1", "-c", str(clients), "-d", f"{seconds:g}s", "--timeout", "20s", "-s", str(script)]
    process = subprocess.Popen(
        [*words, f"{server.address}:predict"], env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield Load(process)
    finally:
        process.kill()
        process.wait()
