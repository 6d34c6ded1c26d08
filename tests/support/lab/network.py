"""The cluster's network: a bridge, and for each node a network namespace connected to it; not visible outside."""

from __future__ import annotations

import subprocess
from pathlib import Path

API = "10.250.0.1"
API_PORT = 6443
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
SERVICES = "10.96.0.0/16"
PODS = "10.244.0.0/16"
BRIDGE = "lab0"
NAMESPACES = Path("/run/netns")
MOST_NODES = 9


def address(number: int) -> str:
    return f"10.250.0.{10 + number}"


def pods(number: int) -> str:
    return f"10.244.{number}.0/24"


def bring_up() -> None:
    """Sets up the control plane's side, in the network namespace of the caller."""
    _ip("link set lo up")
    # With its own address: otherwise a bridge takes one from its ports, and changes it when a node leaves.
    _ip(f"link add {BRIDGE} address 02:00:00:00:00:01 type bridge")
    _ip(f"address add {API}/24 dev {BRIDGE}")
    _ip(f"link set {BRIDGE} up")
    for number in range(1, MOST_NODES + 1):
        _ip(f"route add {pods(number)} via {address(number)} dev {BRIDGE}")


def plug_in(number: int) -> Path:
    """Creates a new network namespace for this node, as after a reboot; returns the path to enter it."""
    name = f"n{number}"
    _ip(f"netns add {name}")
    _ip(f"link add {_cable(number)} type veth peer name eth0 netns {name}")
    _ip(f"link set {_cable(number)} master {BRIDGE} up")
    for command in ("link set lo up", f"address add {address(number)}/24 dev eth0", "link set eth0 up"):
        _ip(f"-n {name} {command}")
    _ip(f"-n {name} route add default via {API}")
    for other in range(1, MOST_NODES + 1):
        if other != number:
            _ip(f"-n {name} route add {pods(other)} via {address(other)}")
    return NAMESPACES / name


def unplug(number: int) -> None:
    _ip(f"netns delete n{number}")
    # The namespace is removed asynchronously; its cable must be deleted before the next one is created.
    subprocess.run(["ip", "link", "delete", _cable(number)], stderr=subprocess.DEVNULL)


def cut(number: int) -> None:
    _ip(f"link set {_cable(number)} down")


def heal(number: int) -> None:
    _ip(f"link set {_cable(number)} up")


def _cable(number: int) -> str:
    return f"to-n{number}"


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)
