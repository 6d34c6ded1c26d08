"""The peer: starts a group of workers in the simplest way, and restarts all of them when one fails."""

import json
import os
import socket
import subprocess
import sys

framework, count, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
status = -1
while status != 0:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    group = {}
    for rank in range(count):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        variables = {"TF_CONFIG": json.dumps(task)}
        if framework == "torch":
            address, port = addresses[0].split(":")
            variables = {"MASTER_ADDR": address, "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(count)}
            variables["LOCAL_RANK"] = str(rank)
        elif framework == "jax":
            variables = {"BENCH_COORDINATOR": addresses[0], "RANK": str(rank), "WORLD_SIZE": str(count)}
        process = subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)
        group[process.pid] = process
    status = 0
    while group and status == 0:
        pid, status = os.waitpid(-1, 0)
        group.pop(pid).returncode = status
    for process in group.values():
        process.kill()
        process.wait()
