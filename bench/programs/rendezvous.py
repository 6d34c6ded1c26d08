"""The peer: torch's c10d dynamic rendezvous with threads as members; prints the seconds of each round as JSON lines."""

import json
import socket
import sys
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

count, rounds = int(sys.argv[1]), int(sys.argv[2])
probe = socket.create_server(("127.0.0.1", 0))
port = probe.getsockname()[1]
probe.close()
server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
barrier = threading.Barrier(count + 1)
returned = [0.0] * count


def member(index: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{port}", "bench", count, count, local_addr="127.0.0.1")
    handler = create_handler(store, C10dRendezvousBackend(store, "bench"), parameters)
    for _ in range(rounds):
        barrier.wait()
        handler.next_rendezvous()
        returned[index] = time.monotonic()
        barrier.wait()


for index in range(count):
    threading.Thread(target=member, args=(index,), daemon=True).start()
for _ in range(rounds):
    barrier.wait()
    began = time.monotonic()
    barrier.wait()
    print(json.dumps(max(returned) - began), flush=True)
