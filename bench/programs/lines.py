"""Lines of output, each after fixed work: writes how long they took to a file."""

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--lines", type=int, required=True)
parser.add_argument("--work", type=int, required=True, help="bytes to hash per line")
parser.add_argument("--output", required=True)
args = parser.parse_args()

block, sha256, write = bytes(args.work), hashlib.sha256, sys.stdout.write
before, cpu_before = time.perf_counter(), time.process_time()
for number in range(args.lines):
    sha256(block)
    write(f"step {number} loss 0.{number:07d} accuracy 0.98714 learning rate 0.00100 samples/s 12873.4\n")
sys.stdout.flush()
result = {"seconds": time.perf_counter() - before, "cpu_s": time.process_time() - cpu_before}
partial = Path(f"{args.output}.{os.getpid()}")
partial.write_text(json.dumps(result))
partial.rename(args.output)
