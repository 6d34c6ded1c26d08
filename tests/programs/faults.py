"""The ways to fail that the programs here share: what happens, before which step, in which rank, how often."""

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path


class Injected(Exception):
    """The exception that a test asked for."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fail-at", type=int, metavar="STEP", help="fail before this step")
    parser.add_argument("--fail-when", type=Path, metavar="FILE", help="wait for FILE first")
    parser.add_argument("--fail-rank", type=int, default=1, help="the rank that fails")
    parser.add_argument(
        "--fail-how", default="raise", help="raise, exit:CODE, SIGNAME, gil, sleep, memory, port or lose:FOLDER"
    )
    often = parser.add_mutually_exclusive_group()
    often.add_argument("--fail-once", type=Path, metavar="FILE", help="only while FILE is absent; it is made then")
    often.add_argument("--fail-always", action="store_true", help="every time, which is the default")


def before_step(step: int, rank: int, given: argparse.Namespace) -> None:
    if step != given.fail_at or rank != given.fail_rank:
        return
    if given.fail_once:
        try:
            given.fail_once.touch(exist_ok=False)
        except FileExistsError:
            return
    while given.fail_when and not given.fail_when.exists():
        time.sleep(0.01)
    print(f"fault {given.fail_how} before step {step}", flush=True)
    fail(given.fail_how)


def fail(how: str) -> None:
    if how == "raise":
        raise Injected("asked for by the test")
    if how.startswith("exit:"):
        sys.exit(int(how[5:]))
    elif how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
    elif how == "gil":
        # One call into C that runs for hours and lets neither another thread nor a Python signal handler run.
        sum(range(10**13))
    elif how == "sleep":
        time.sleep(10**6)
    elif how.startswith("lose:"):
        shutil.rmtree(how[5:])  # as if the machine were gone
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "memory":
        eat_memory()
    elif how == "port":
        raise OSError(98, "Address already in use")
    else:
        raise ValueError(f"no such way to fail: {how}")


def eat_memory(limit: float = float("inf")) -> None:
    """Takes 16 MiB at a time, written to so that they are really used, up to `limit` MiB."""
    taken: list[bytearray] = []
    while len(taken) * 16 < limit:
        taken.append(bytearray(b"x") * (16 << 20))
        time.sleep(0.005)
    time.sleep(10**6)
