"""A cluster as tests and people use it: started or joined, asked, attacked, and left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from support.lab import components, control, images, keeper, limits, needs, objects, pki, simulated, wire
from support.lab.inside import Settings
from support.lab.places import TESTS, Place, locked

NODES = 3
READY_S = 60.0
GONE_S = 60.0
KEPT_LOGS = 8


class LabError(Exception):
    """The cluster could not be had or did not do what it was asked."""


class Cluster:
    """A connection to a running cluster; without `stays`, the cluster ends when its last connection does."""

    def __init__(self, name: str, line: wire.Line) -> None:
        self.place = Place(name)
        self.parts = components.build()
        self._line = line
        self._asking = threading.Lock()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._added: set[tuple[str, str]] = set()

    # ---- coming and going

    @classmethod
    def start(
        cls, name: str = "", nodes: int = NODES, images: tuple[str, ...] = ("plain",), stays: bool = False
    ) -> Cluster:
        """A new cluster, all nodes Ready; what is not built yet is built first."""
        if reason := needs.unmet():
            raise LabError(f"no cluster can run here: {reason}")
        prepare(images)
        line, process, place = _start(Settings(name or f"t{os.urandom(3).hex()}", nodes, images, stays, -1, -1, -1))
        try:
            message = line.receive() or {"error": "it ended while coming up"}
            if "error" in message:
                raise LabError(f"{message['error']}\nlogs: {place.logs}")
            cluster = cls(place.name, line)
            cluster.wait_ready()
            cluster.wait_dns()
        except BaseException:
            process.terminate()
            process.wait(GONE_S)
            raise
        cluster._keeper = process
        return cluster

    @classmethod
    def join(cls, name: str) -> Cluster:
        """One that is up already."""
        try:
            cluster = cls(name, wire.dial(Place(name).socket))
        except OSError as error:
            raise LabError(f"no cluster {name} is up") from error
        cluster._ask("describe")  # it may be about to end; once it has answered it stays for us
        return cluster

    def leave(self) -> None:
        """Whoever leaves last waits until nothing of the cluster is left."""
        if self._ask("leave"):
            self._gone()
        self._line.close()

    def end(self) -> None:
        """For everybody, whoever still uses it."""
        self._ask("end")
        self._gone()
        self._line.close()

    def _gone(self) -> None:
        eventually(f"cluster {self.place.name} is gone", lambda: not self.place.alive.exists(), GONE_S)
        if self._keeper:
            self._keeper.wait(GONE_S)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    # ---- asking

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def logs(self) -> Path:
        """Of the control plane, and in a folder for each node those of its services and pods."""
        return self.place.logs

    @property
    def nodes(self) -> list[str]:
        return list(self._ask("describe")["nodes"])

    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.place.pki / "admin.kubeconfig"

    def user(self, name: str, namespace: str) -> Path:
        """The kubeconfig of somebody who has rights in one namespace only."""
        path = self.place.pki / f"{namespace}-{name}.kubeconfig"
        pair = pki.issue(pki.read(self.place.pki, "ca"), name)
        admin = json.loads(self.kubeconfig().read_text())
        server = admin["clusters"][0]["cluster"]["server"]
        ca = (self.place.pki / "ca.crt").read_bytes()
        self.apply(*objects.rights(name, namespace))
        return pki.write_kubeconfig(path, pki.kubeconfig(server, ca, pair, namespace))

    def kubectl(self, *words: str, kubeconfig: Path | None = None, input: str = "") -> str:
        """Its output; a LabError that ends with what it said where it fails."""
        command = [str(self.parts.program("kubectl")), f"--kubeconfig={kubeconfig or self.kubeconfig()}", *words]
        done = subprocess.run(command, input=input, capture_output=True, text=True)
        if done.returncode:
            raise LabError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *words: str, kubeconfig: Path | None = None) -> Any:
        """What `kubectl get` answers, as data."""
        return json.loads(self.kubectl("get", *words, "--output=json", kubeconfig=kubeconfig))

    def apply(self, *wanted: Mapping[str, Any], kubeconfig: Path | None = None) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": list(wanted)}
        self.kubectl("apply", "--filename=-", input=json.dumps(items), kubeconfig=kubeconfig)

    def requests(self, user: str) -> list[dict[str, Any]]:
        """All that this person has asked of the API server, by its own audit log."""
        lines = (self.logs / control.AUDIT).read_text().splitlines()
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [each for each in found if each["user"]["username"] == user and each["stage"] == "RequestReceived"]

    def ready(self) -> dict[str, bool]:
        """By node, what the cluster thinks of it."""
        found = {}
        for node in self.get("nodes")["items"]:
            conditions = {each["type"]: each["status"] for each in node["status"].get("conditions", ())}
            found[node["metadata"]["name"]] = conditions.get("Ready") == "True"
        return found

    def wait_ready(self, *nodes: str, limit: float = READY_S) -> None:
        wanted = nodes or tuple(self.nodes)
        self._wait(f"{', '.join(wanted)} Ready", lambda: all(self.ready().get(node) for node in wanted), limit)

    def wait_lost(self, node: str, limit: float = READY_S) -> None:
        self._wait(f"{node} not Ready", lambda: not self.ready().get(node), limit)

    def wait_dns(self, limit: float = READY_S) -> None:
        def answers() -> bool:
            found = self.get("deployment/coredns", "--namespace=kube-system")
            wanted = min(int(found["spec"]["replicas"]), len(self.nodes))  # one a node
            return int(found["status"].get("readyReplicas", 0)) >= wanted

        self._wait("DNS answers", answers, limit)

    def _wait(self, what: str, check: Callable[[], bool], limit: float) -> None:
        def quietly() -> bool:
            with contextlib.suppress(LabError):
                return check()
            return False

        eventually(f"{what}; logs: {self.logs}", quietly, limit)

    # ---- attacking

    def power_off(self, node: str) -> None:
        """Every process of the node dies at once; its disk stays."""
        self._ask("power_off", node=node)

    def power_on(self, node: str) -> None:
        self._ask("power_on", node=node)

    def cut(self, node: str) -> None:
        """Pull its network cable."""
        self._ask("cut", node=node)

    def heal(self, node: str) -> None:
        self._ask("heal", node=node)

    def stop_api(self) -> None:
        self._ask("stop", program="kube-apiserver")

    def start_api(self) -> None:
        self._ask("start", program="kube-apiserver")
        self._wait("the API server answers", lambda: self.kubectl("get", "--raw=/readyz") == "ok", READY_S)

    def restart_api(self) -> None:
        self.stop_api()
        self.start_api()

    def repair(self) -> None:
        """All on, connected and Ready again, and without the extended resources that were added here."""
        self.start_api()
        for node in self.nodes:
            self.power_on(node)
            self.heal(node)
        self.wait_ready()
        self.wait_dns()
        for node, resource in sorted(self._added):
            self._patch_status(node, resource, None)
        self._added.clear()

    # ---- furnishing

    def images(self, *names: str) -> None:
        """Have these on every node that is on, made if they are not yet."""
        prepare(names)
        self._ask("load", images=names)

    @contextlib.contextmanager
    def namespace(self, name: str, restricted: bool = True) -> Iterator[str]:
        """A namespace for a while; afterwards nothing runs in it any more, and the cluster removes the rest."""
        self._wait(f"an earlier {name} is gone", lambda: name not in self.namespaces(), READY_S)
        self.apply(objects.namespace(name, restricted))
        here = f"--namespace={name}"
        self._wait("its service account", lambda: bool(self.get("serviceaccount/default", here)), READY_S)
        try:
            yield name
        finally:
            self.start_api()  # a test that failed may have left it off
            self.kubectl("delete", "namespace", name, "--wait=false")
            # By force: a pod of a lost node stays until somebody says that the node will not come back.
            self.kubectl("delete", "pods", "--all", here, "--force", "--grace-period=0", "--wait=false")
            # The rest goes 5 s later, by a constant of the controller manager: not worth waiting for.
            self._wait(f"{name} has no pods", lambda: not self.get("pods", here)["items"], GONE_S)
            for found in self.get("persistentvolumes")["items"]:
                if found["spec"].get("claimRef", {}).get("namespace") == name:
                    self.kubectl("delete", "persistentvolume", found["metadata"]["name"], "--wait=false")
            shutil.rmtree(self.place.shared / name, ignore_errors=True)

    def namespaces(self) -> list[str]:
        return [found["metadata"]["name"] for found in self.get("namespaces")["items"]]

    def simulate(self, nodes: int, start_s: float = 0.0) -> None:
        """Beside the real nodes some that are not there; a pod on one (see lab.simulated) runs `start_s` later."""
        self._ask("simulate", program=str(components.simulator()), start_s=start_s)
        wanted = [simulated.node(number) for number in range(1, nodes + 1)]
        self.apply(*wanted)
        self.wait_ready(*(str(each["metadata"]["name"]) for each in wanted))

    def quota(self, namespace: str, hard: Mapping[str, str]) -> None:
        self.apply(objects.quota(namespace, hard))

    def extended_resources(self, node: str, resources: Mapping[str, int]) -> None:
        """Such as {"nvidia.com/gpu": 8}: the scheduler counts them, nothing is behind them."""
        for resource, amount in resources.items():
            self._patch_status(node, resource, str(amount))
            self._added.add((node, resource))

    def _patch_status(self, node: str, resource: str, amount: str | None) -> None:
        status = {"status": {"capacity": {resource: amount}, "allocatable": {resource: amount}}}
        self.kubectl("patch", "node", node, "--subresource=status", "--type=merge", f"--patch={json.dumps(status)}")

    @contextlib.contextmanager
    def reserved(self, node: str, resources: Mapping[str, str]) -> Iterator[None]:
        """For a while, this much of the node (cpu, memory) is not for pods."""
        whole = self._allocatable(node)
        self._ask("reserve", node=node, resources=dict(resources))
        self._wait(f"{node} is smaller", lambda: self._allocatable(node) != whole and self.ready()[node], READY_S)
        try:
            yield
        finally:
            self._ask("reserve", node=node, resources={})
            self._wait(
                f"{node} is whole again", lambda: self._allocatable(node) == whole and self.ready()[node], READY_S
            )

    def _allocatable(self, node: str) -> tuple[str, str]:
        found = self.get(f"node/{node}")["status"]["allocatable"]
        return found["cpu"], found["memory"]

    def shared_volume(self, namespace: str, claim: str, size: str = "1Gi") -> Path:
        """A claim that every pod on every node may write to at once; the folder behind it."""
        return self._volume(namespace, claim, size, self.place.shared / namespace / claim, "")

    def local_volume(self, namespace: str, claim: str, node: str, size: str = "1Gi") -> Path:
        """A claim that ties its pods to one node."""
        return self._volume(namespace, claim, size, self.place.shared / namespace / f"{claim}-on-{node}", node)

    def _volume(self, namespace: str, claim: str, size: str, folder: Path, node: str) -> Path:
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        self.apply(*objects.volume(namespace, claim, folder, size, node))
        return folder

    def _ask(self, verb: str, **words: Any) -> Any:
        message = None
        with self._asking, contextlib.suppress(OSError):
            self._line.send({"do": verb, **words})
            message = self._line.receive()
        if message is None:
            raise LabError(f"cluster {self.name} has ended; logs: {self.logs}")
        if "error" in message:
            raise LabError(f"{verb}: {message['error']}")
        return message["answer"]


def prepare(names: tuple[str, ...] | None = None) -> None:
    """Build what is missing: all components, and these images (all of them, if none are named)."""
    images.build(components.build(), (*images.BOOT, *(images.IMAGES if names is None else names)))


def eventually(what: str, check: Callable[[], bool], limit: float) -> None:
    until = time.monotonic() + limit
    while not check():
        if time.monotonic() > until:
            raise LabError(f"not within {limit:g} s: {what}")
        time.sleep(0.1)


def _start(settings: Settings) -> tuple[wire.Line, subprocess.Popen[bytes], Place]:
    """Start the keeper, which brings up the rest; our end of its first connection."""
    place = Place(settings.name)
    keeper.sweep(place)
    with locked(place.starting):
        limits.raise_them()
        alive = place.alive.open("a")
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LabError(f"cluster {place.name} is up already") from None
        place.folder.mkdir(mode=0o700)
    make_room_for_logs(place)
    ours, theirs = socket.socketpair()
    given = Settings(**{**vars(settings), "first": theirs.fileno()})
    with alive, theirs, (place.logs / "cluster.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.lab.keeper", given.to_json(), str(alive.fileno())],
            env={**os.environ, "PYTHONPATH": str(TESTS)}, start_new_session=True,
            pass_fds=(theirs.fileno(), alive.fileno()), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    return wire.Line(ours), process, place


def make_room_for_logs(place: Place) -> None:
    """Those of the last clusters are kept, and of all that are up."""
    shutil.rmtree(place.logs, ignore_errors=True)
    place.logs.mkdir(parents=True)
    ended: list[tuple[float, Path]] = []
    for path in place.logs.parent.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another cluster that starts makes room, too
            if not Place(path.name).alive.exists():
                ended.append((path.stat().st_mtime, path))
    for _, old in sorted(ended, reverse=True)[KEPT_LOGS:]:
        shutil.rmtree(old, ignore_errors=True)
