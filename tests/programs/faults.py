"""Failures shared by the programs here: which kind, before which step, in which rank, how often."""

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path


class Injected(Exception):
    """The exception that a test requested."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fail-at", type=int, metavar="STEP", help="fail before this step")
    parser.add_argument("--fail-when", type=Path, metavar="FILE", help="wait for FILE first")
    parser.add_argument("--fail-rank", type=int, default=1, help="the rank that fails")
    parser.add_argument(
        "--fail-how", default="raise", help="raise, exit:CODE, SIGNAME, gil, sleep, memory, port or lose:FOLDER"
    )
    frequency = parser.add_mutually_exclusive_group()
    frequency.add_argument("--fail-once", type=Path, metavar="FILE", help="only if FILE does not exist; it is created")
    frequency.add_argument("--fail-always", action="store_true", help="every time (the default)")


def before_step(step: int, rank: int, options: argparse.Namespace) -> None:
    if step != options.fail_at or rank != options.fail_rank:
        return
    if options.fail_once:
        try:
            options.fail_once.touch(exist_ok=False)
        except FileExistsError:
            return
    while options.fail_when and not options.fail_when.exists():
        time.sleep(0.01)
    print(f"fault {options.fail_how} before step {step}", flush=True)
    fail(options.fail_how)


def fail(how: str) -> None:
    if how == "raise":
        raise Injected("asked for by the test")
    if how.startswith("exit:"):
        sys.exit(int(how[5:]))
    elif how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
    elif how == "gil":
        # One call into C that runs for hours and blocks all other threads and Python signal handlers.
        sum(range(10**13))
    elif how == "sleep":
        time.sleep(10**6)
    elif how.startswith("lose:"):
        shutil.rmtree(how[5:])  # as if the machine were lost
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "memory":
        eat_memory()
    elif how == "port":
        raise OSError(98, "Address already in use")
    else:
        raise ValueError(f"no such way to fail: {how}")


def eat_memory(limit: float = float("inf")) -> None:
    """Allocates 16 MiB at a time and writes to them, so that they are really used, up to `limit` MiB."""
    blocks: list[bytearray] = []
    while len(blocks) * 16 < limit:
        blocks.append(bytearray(b"x") * (16 << 20))
        time.sleep(0.005)
    time.sleep(10**6)
