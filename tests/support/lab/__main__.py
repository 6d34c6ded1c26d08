"""The command of the lab: `python -m lab up`, `down`, and what else a person does with a cluster."""

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
    parser = argparse.ArgumentParser(prog="lab", description="A real Kubernetes on this machine, for tests.")
    parser.add_argument("--name", default=NAME, help="of the cluster, where more than one is up")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="bring a cluster up; it stays until `down`")
    up.add_argument("--nodes", type=int, default=cluster.NODES)
    up.add_argument("--images", nargs="*", default=["plain", "busybox"], choices=sorted(images.IMAGES))
    verbs.add_parser("down", help="end it, and leave nothing")
    verbs.add_parser("status", help="is it up, and how to use it")
    enter = verbs.add_parser("enter", help="a shell in its namespaces, or on one of its nodes")
    enter.add_argument("node", nargs="?", default="")
    more = verbs.add_parser("images", help="put more images on its nodes")
    more.add_argument("images", nargs="+", choices=sorted(images.IMAGES))
    build = verbs.add_parser("build", help="build everything that clusters need, start nothing")
    build.add_argument("more", nargs="*", choices=[components.KWOK.name], help="what only some ask for")
    verbs.add_parser("lock", help="rewrite debian.txt and load.txt with the packages that apt offers now")
    words = parser.parse_args()
    try:
        if words.verb == "up":
            _up(words.name, words.nodes, tuple(words.images))
        elif words.verb == "down":
            _down(words.name)
        elif words.verb == "status":
            print(_how_to(Cluster.join(words.name)))
        elif words.verb == "enter":
            _enter(Cluster.join(words.name), words.node)
        elif words.verb == "images":
            Cluster.join(words.name).images(*words.images)
        elif words.verb == "build":
            cluster.prepare()
            if words.more:
                components.simulator()
        else:
            components.lock_debian()
    except (LabError, components.BuildFailed) as error:
        say(str(error))
        return 1
    return 0


def _up(name: str, nodes: int, wanted: tuple[str, ...]) -> None:
    try:
        found = Cluster.join(name)
        found.images(*wanted)
    except LabError:
        cluster.prepare(wanted)
        began = time.monotonic()
        found = Cluster.start(name, nodes, wanted, stays=True)
        say(f"{nodes} nodes Ready, DNS answers, after {time.monotonic() - began:.1f} s")
    print(_how_to(found))


def _down(name: str) -> None:
    try:
        Cluster.join(name).end()
    except LabError:
        # Perhaps one was, and its keeper was killed.
        keeper.sweep(Place(name))
        say(f"no cluster {name} is up")


def _enter(found: Cluster, node: str) -> None:
    """Become a shell in there."""
    pid = _first_process_of(found, node) if node else int(found.place.pid.read_text())
    env = {**os.environ, "PATH": found.parts.path, "KUBECONFIG": str(found.place.pki / "inside.kubeconfig")}
    os.execvpe("nsenter", ["nsenter", f"--target={pid}", "--mount", "--net", "--pid", "--uts", "--ipc", "sh"], env)


def _first_process_of(found: Cluster, node: str) -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_text().split("\0")
            if words[1:3] == ["-m", "support.lab.boot"] and Machine.from_json(words[3]).disk == found.place.disk(node):
                return int(path.parent.name)
    raise LabError(f"{node} is not a node of cluster {found.name}, or it is off")


def _how_to(found: Cluster) -> str:
    enter = f"PYTHONPATH={TESTS} {sys.executable} -m support.lab --name {found.name} enter"
    return "\n".join(
        [
            f"export KUBECONFIG={found.kubeconfig()}",
            f"export PATH={found.parts.program('kubectl').parent}:$PATH",
            f"# enter it, or a node of it: {enter} [n1]",
            f"# logs of everything: {found.logs}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
