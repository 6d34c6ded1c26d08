"""Knows its peers by CLUSTER_CONFIG and itself by POD_NAME alone: every task tells the first one who it is."""

import json
import os
import socket
import time

Address = tuple[str, int]


def main() -> None:
    addresses = [address(each) for each in json.loads(os.environ["CLUSTER_CONFIG"])["worker"]]
    index = int(os.environ["POD_NAME"].removeprefix("worker-"))
    if index == 0:
        call(addresses)
    else:
        with connected(addresses[0]) as line:
            line.sendall(f"{index}\n".encode())
            print("answered", line.makefile().readline().strip(), flush=True)


def address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)


def call(addresses: list[Address]) -> None:
    lines: dict[int, socket.socket] = {}
    with socket.create_server(addresses[0], backlog=len(addresses)) as server:
        while len(lines) < len(addresses) - 1:
            line, (host, _) = server.accept()
            index = int(line.makefile().readline())
            assert host == addresses[index][0], f"worker-{index} is at {host}, not at {addresses[index]}"
            lines[index] = line
    print("present", *sorted({0, *lines}), flush=True)
    for line in lines.values():
        with line:
            line.sendall(f"{len(addresses)}\n".encode())


def connected(first: Address) -> socket.socket:
    while True:
        try:
            return socket.create_connection(first)
        except ConnectionRefusedError:
            time.sleep(0.05)  # it does not listen yet; the run's own limits end this


if __name__ == "__main__":
    main()
