"""Workers that average their parameters with those that are there, and carry on without those that are gone.

usage: averages.py FOLDER [--save]; ends after the step in FOLDER/finish. Each worker listens at its address in
CLUSTER_CONFIG and tells its peers its parameter. `--save`: worker-0 takes a snapshot of each step.
"""

import json
import os
import socket
import socketserver
import sys
import threading
import time
from pathlib import Path

import paceline

folder, saves = Path(sys.argv[1]), "--save" in sys.argv
rank, generation = int(os.environ["PACELINE_RANK"]), os.environ["PACELINE_GENERATION"]
addresses = json.loads(os.environ["CLUSTER_CONFIG"])["worker"]
restore = os.environ["PACELINE_RESTORE"]
own = json.loads(Path(restore, "state").read_text()) if restore else {"step": 0, "value": float(rank)}
lock = threading.Lock()
print(f"generation {generation}, peers {' '.join(addresses)}", flush=True)
print(f"begins at step {own['step']}", flush=True)


class Tell(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with lock:
            self.wfile.write(json.dumps(own).encode())


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


def ask(address: str) -> "dict | None":
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as peer:
            return json.loads(peer.makefile("rb").read() or b"null")
    except (OSError, ValueError):
        return None  # it is gone


host, _, port = addresses[rank].rpartition(":")
threading.Thread(target=Server((host, int(port)), Tell).serve_forever, daemon=True).start()
while True:
    there = [peer for each in addresses if each != addresses[rank] and (peer := ask(each)) is not None]
    with lock:
        own["step"] = max(own["step"], *(peer["step"] for peer in there), 0) + 1
        own["value"] = sum((peer["value"] for peer in there), own["value"]) / (len(there) + 1)
        step = own["step"]
    paceline.report(step=step, peers=len(there))
    if saves and rank == 0:
        staging = Path(os.environ["PACELINE_SNAPSHOT_DIR"])
        (staging / "partial").mkdir()  # fails if the attempt before has left one
        (staging / "partial" / "state").write_text(json.dumps(own))
        (staging / "partial").rename(staging / f"step-{step}")
    finish = folder / "finish"
    if finish.exists() and step >= int(finish.read_text()):
        break
    time.sleep(0.05)
print(f"ends at step {step}", flush=True)
