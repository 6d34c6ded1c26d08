"""The command line of the lab: `python -m support.lab up`, `down`, and other commands for a cluster."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

from support.lab import cluster, components, images, keeper
from support.lab.cluster import Cluster, LabError
from support.lab.node import Machine
from support.lab.places import TESTS, Place, say

NAME = "hand"


def main() -> int:
    parser = argparse.ArgumentParser(prog="lab", description="A real Kubernetes cluster on this machine, for tests.")
    parser.add_argument("--name", default=NAME, help="name of the cluster, if more than one is running")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start a cluster; it runs until `down`")
    up.add_argument("--nodes", type=int, default=cluster.NODES)
    up.add_argument("--images", nargs="*", default=["plain", "busybox"], choices=sorted(images.IMAGES))
    verbs.add_parser("down", help="end the cluster and remove everything")
    verbs.add_parser("status", help="show whether the cluster is running, and how to use it")
    enter = verbs.add_parser("enter", help="open a shell in its namespaces, or on one of its nodes")
    enter.add_argument("node", nargs="?", default="")
    more = verbs.add_parser("images", help="load more images on its nodes")
    more.add_argument("images", nargs="+", choices=sorted(images.IMAGES))
    build = verbs.add_parser("build", help="build everything that clusters need, without starting one")
    build.add_argument("--kwok", action="store_true", help="also build what simulates nodes")
    verbs.add_parser("lock", help="update debian.txt, load.txt and prometheus.txt to the versions that apt offers now")
    options = parser.parse_args()
    try:
        if options.verb == "up":
            _up(options.name, options.nodes, tuple(options.images))
        elif options.verb == "down":
            _down(options.name)
        elif options.verb == "status":
            print(_how_to(Cluster.join(options.name)))
        elif options.verb == "enter":
            _enter(Cluster.join(options.name), options.node)
        elif options.verb == "images":
            Cluster.join(options.name).images(*options.images)
        elif options.verb == "build":
            cluster.prepare()
            if options.kwok:
                components.simulator()
        else:
            components.lock_debian()
    except (LabError, components.BuildFailed) as error:
        say(str(error))
        return 1
    return 0


def _up(name: str, nodes: int, image_names: tuple[str, ...]) -> None:
    try:
        running = Cluster.join(name)
        running.images(*image_names)
    except LabError:
        cluster.prepare(image_names)
        started = time.monotonic()
        running = Cluster.start(name, nodes, image_names, stays=True)
        say(f"{nodes} nodes Ready, DNS answers, after {time.monotonic() - started:.1f} s")
    print(_how_to(running))


def _down(name: str) -> None:
    try:
        Cluster.join(name).end()
    except LabError:
        # Its keeper may have been killed.
        keeper.sweep(Place(name))
        say(f"no cluster {name} is up")


def _enter(running: Cluster, node: str) -> None:
    """Replaces this process with a shell in the cluster or the node."""
    pid = _first_process_of(running, node) if node else int(running.place.pid.read_text())
    env = {**os.environ, "PATH": running.parts.path, "KUBECONFIG": str(running.place.pki / "inside.kubeconfig")}
    os.execvpe("nsenter", ["nsenter", f"--target={pid}", "--mount", "--net", "--pid", "--uts", "--ipc", "sh"], env)


def _first_process_of(running: Cluster, node: str) -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_text().split("\0")
            if command[1:3] == ["-m", "support.lab.boot"] and Machine.from_json(command[3]).disk == running.place.disk(
                node
            ):
                return int(path.parent.name)
    raise LabError(f"{node} is not a node of cluster {running.name}, or it is off")


def _how_to(running: Cluster) -> str:
    enter = f"PYTHONPATH={TESTS} {sys.executable} -m support.lab --name {running.name} enter"
    return "\n".join(
        [
            f"export KUBECONFIG={running.kubeconfig()}",
            f"export PATH={running.parts.program('kubectl').parent}:$PATH",
            f"# enter it, or a node of it: {enter} [n1]",
            f"# logs of everything: {running.logs}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
