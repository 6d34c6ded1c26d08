"""Steps of fixed work, each with a `paceline.report`: writes its step times, and what a report costs by itself."""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--work", type=int, required=True, help="kilobytes to hash a step")
parser.add_argument("--output", required=True)
given = parser.parse_args()

block = bytes(1024)


def work(kilobytes: int) -> None:
    digest = hashlib.sha256()
    for _ in range(kilobytes):
        digest.update(block)


for _ in range(20):
    work(given.work)
taken, calls, cpu = [], [], 0.0
before = time.perf_counter()
for step in range(1, given.steps + 1):
    work(given.work)
    cpu_before, called = time.thread_time(), time.perf_counter()
    paceline.report(step=step, loss=1.0 / step)
    now = time.perf_counter()
    cpu += time.thread_time() - cpu_before
    calls.append(now - called)
    taken.append(now - before)
    before = now
found = {"steps": taken, "calls": calls, "call_cpu_s": cpu / given.steps}
Path(f"{given.output}.{os.getpid()}").write_text(json.dumps(found))
