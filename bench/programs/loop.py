"""Steps of fixed work, each with a `paceline.report`: writes the duration of each step and of each report."""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--work", type=int, required=True, help="kilobytes to hash per step")
parser.add_argument("--output", required=True)
args = parser.parse_args()

block = bytes(1024)


def work(kilobytes: int) -> None:
    digest = hashlib.sha256()
    for _ in range(kilobytes):
        digest.update(block)


for _ in range(20):
    work(args.work)
times, calls, cpu = [], [], 0.0
before = time.perf_counter()
for step in range(1, args.steps + 1):
    work(args.work)
    cpu_before, called = time.thread_time(), time.perf_counter()
    paceline.report(step=step, loss=1.0 / step)
    now = time.perf_counter()
    cpu += time.thread_time() - cpu_before
    calls.append(now - called)
    times.append(now - before)
    before = now
result = {"steps": times, "calls": calls, "call_cpu_s": cpu / args.steps}
Path(f"{args.output}.{os.getpid()}").write_text(json.dumps(result))
