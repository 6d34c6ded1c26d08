"""Writes random data to everything that a task has: its report socket, its output, its folders, its other descriptors.

fuzz_channels.py SECONDS SEED [WATCHED-FOLDER]
"""

import contextlib
import ctypes
import json
import os
import random
import shutil
import socket
import sys
import time
from pathlib import Path

LIMIT, SEED = float(sys.argv[1]), int(sys.argv[2])
RNG = random.Random(SEED)
NUMBER = int(os.environ["PACELINE_REPORT_FD"])
REPORTS = socket.socket(fileno=os.dup(NUMBER))
REPORTS.setblocking(False)
SNAPSHOTS, CURVES = Path(os.environ["PACELINE_SNAPSHOT_DIR"]), Path(os.environ["PACELINE_TENSORBOARD_DIR"])
VALUES = (
    None, True, 0, -1, 3, 2**53, 10**400, 1.5, float("nan"), float("-inf"), "", "x" * 9000, "\ud800", "../..", [], {},
    [1], {"a": {"b": 1}}, "step-1-g1", [[[[]]]],
)  # fmt: skip
# Not "raised": the agent ends a task that reports an exception.
KINDS = ("saved", "warning", "asks", "save", "agree", "follow", "ingest", "cold", "x", None, 5, [])
FIELDS = ("step", "text", "say", "which", "count", "stage", "data", "run", "files", "size", "why", "done", "wants")


def report():
    choice = RNG.randrange(6)
    if choice == 0:
        data = RNG.randbytes(RNG.randrange(3000))
    elif choice == 1:
        depth = RNG.choice((100, 900, 990, 1000, 20_000))
        data = b'{"_":"warning","text":' + b"[" * depth + b"]" * depth + b"}"
    else:
        message = {RNG.choice(FIELDS): RNG.choice(VALUES) for _ in range(RNG.randrange(4))}
        if choice > 2:
            message["_"] = RNG.choice(KINDS)
        message["metrics"] = {"loss": RNG.choice(VALUES)}
        data = json.dumps(message).encode()
    with contextlib.suppress(BlockingIOError, OSError):
        REPORTS.send(data)


def output():
    data = RNG.choice((RNG.randbytes(5000), b"\r" * 1000, b"\n" * 1000, b"\0" * 70_000, b"Traceback (most recent"))
    os.write(RNG.choice((1, 2)), data)


def snapshot():
    step = RNG.choice((RNG.randrange(100), 10**16 - 1, 2**53, RNG.randrange(10**9)))
    path = SNAPSHOTS / RNG.choice((f"step-{step}", f"step-{step}", "step-x", os.fsdecode(b"\xff\xfe"), "x" * 200))
    kind = RNG.randrange(8)
    with contextlib.suppress(OSError):
        if kind == 0:
            path.write_bytes(b"a file")
            return
        if kind == 1:
            path.symlink_to("/etc")
            return
        partial = SNAPSHOTS / f"partial-{RNG.randrange(10**9)}"
        partial.mkdir()
        about = partial / "paceline.json"
        if kind == 2:
            os.mkfifo(about)
        elif kind == 3:
            about.symlink_to("/dev/zero")
        elif kind == 4:
            about.mkdir()
        elif kind == 5:
            about.write_bytes(b'{"metrics":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
        else:
            fields = {
                "parts": RNG.choice((1, 1, 1, 2, 0, 10**9, "x", None)),
                "metrics": RNG.choice((1, {"loss": RNG.choice(VALUES)}, {"x" * 100_000: 1.0})),
                "versions": RNG.choice((1, {"a": RNG.choice(VALUES)}, {"x" * 100_000: "y"})),
            }
            about.write_text(json.dumps(fields))
            (partial / RNG.choice(("weights", os.fsdecode(b"\xff"), "a\nb"))).write_bytes(RNG.randbytes(1000))
        partial.rename(path)
        REPORTS.send(b'{"_":"saved"}')


def watched():
    """The folder that is captured as it is, if the job says so."""
    folder = Path(sys.argv[3]) / RNG.choice(("", "a", "a/b", "d/" * RNG.randrange(1, 100)))
    path = folder / RNG.choice(("weights", "paceline.json", os.fsdecode(b"\xff"), "a\nb", "x" * 250))
    kind = RNG.randrange(8)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.symlink_to(RNG.choice(("/etc", "weights", "../..", str(path))))
        elif kind == 2:
            shutil.rmtree(folder)
        elif kind == 3:
            path.unlink()
        elif not path.is_fifo():  # opening it would block
            path.write_bytes(RNG.choice((RNG.randbytes(1000), b"[" * 100_000)))


def curves():
    CURVES.mkdir(parents=True, exist_ok=True)
    odd = os.fsdecode(b"\xff.tfevents.")
    name = RNG.choice((f"events.out.tfevents.{RNG.randrange(9)}", odd, "tfevents" + "9" * 240))
    with contextlib.suppress(OSError), (CURVES / name).open("ab") as file:
        file.write(RNG.choice((RNG.randbytes(500), b"\x80" * 100_000, b"\0" * 1000)))


def descriptors():
    """All others that it has inherited, such as the record of its imports."""
    for number in range(4, 100):
        if number != REPORTS.fileno():
            with contextlib.suppress(OSError):
                data = RNG.choice((b"\xff\n", b"[" * 5000 + b"\n", b'{"environment":1,"path":2,"late":3}\n"json"\n'))
                os.write(number, data)


def rename():
    ctypes.CDLL(None).prctl(15, RNG.choice((b"\xff\xfe) R 1", b") ) )", b"", b"a b\nc")), 0, 0, 0)


def nested():
    """More folders in one another than Python can recurse into, or a path can name."""
    before = Path.cwd()
    os.chdir(SNAPSHOTS)
    for _ in range(1100):
        Path("nested").mkdir()
        os.chdir("nested")
    os.chdir(before)


if LIMIT > 5:  # deleting them takes some seconds
    nested()
folders = (watched, watched) if len(sys.argv) > 3 else (snapshot, snapshot)
actions = (report, report, report, report, output, *folders, curves, descriptors, rename)
until = time.monotonic() + LIMIT
while time.monotonic() < until:
    RNG.choice(actions)()
    time.sleep(0.0005)
print("\nthe end", flush=True)
REPORTS.setblocking(True)
REPORTS.send(b'{"step": 1000000, "loss": 0.5}')
