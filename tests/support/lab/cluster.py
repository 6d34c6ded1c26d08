"""A cluster as tests and users use it: start or join it, query it, inject failures, and leave it."""

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
READY_S = 180.0
GONE_S = 180.0
KEPT_LOGS = 8


class LabError(Exception):
    """The cluster could not be started, or a request to it failed."""


class Cluster:
    """A connection to a running cluster; without `stays`, the cluster ends when its last connection does."""

    def __init__(self, name: str, line: wire.Line) -> None:
        self.place = Place(name)
        self.parts = components.build()
        self._line = line
        self._asking = threading.Lock()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._added: set[tuple[str, str]] = set()

    # ---- starting and leaving

    @classmethod
    def start(
        cls, name: str = "", nodes: int = NODES, images: tuple[str, ...] = ("plain",), stays: bool = False
    ) -> Cluster:
        """Starts a new cluster and waits until all nodes are Ready; missing components are built first."""
        if reason := needs.unmet():
            raise LabError(f"no cluster can run here: {reason}")
        prepare(images)
        line, process, place = _start(Settings(name or f"t{os.urandom(3).hex()}", nodes, images, stays, -1, -1, -1))
        try:
            message = line.receive() or {"error": "it ended during startup"}
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
        """Connects to a running cluster."""
        try:
            cluster = cls(name, wire.dial(Place(name).socket))
        except OSError as error:
            raise LabError(f"no cluster {name} is up") from error
        cluster._ask("describe")  # it may be about to end; after an answer it stays up for this connection
        return cluster

    def leave(self) -> None:
        """Disconnects; the last connection waits until the cluster has ended completely."""
        if self._ask("leave"):
            self._wait_ended()
        self._line.close()

    def end(self) -> None:
        """Ends the cluster for all its users."""
        self._ask("end")
        self._wait_ended()
        self._line.close()

    def _wait_ended(self) -> None:
        eventually(f"cluster {self.place.name} is gone", lambda: not self.place.alive.exists(), GONE_S)
        if self._keeper:
            self._keeper.wait(GONE_S)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    # ---- queries

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def logs(self) -> Path:
        """Logs of the control plane, and for each node a folder with logs of its services and pods."""
        return self.place.logs

    @property
    def nodes(self) -> list[str]:
        return list(self._ask("describe")["nodes"])

    def kubeconfig(self) -> Path:
        """The kubeconfig of the administrator."""
        return self.place.pki / "admin.kubeconfig"

    def user(self, name: str, namespace: str) -> Path:
        """The kubeconfig of a user who has permissions in one namespace only."""
        path = self.place.pki / f"{namespace}-{name}.kubeconfig"
        pair = pki.issue(pki.read(self.place.pki, "ca"), name)
        admin = json.loads(self.kubeconfig().read_text())
        server = admin["clusters"][0]["cluster"]["server"]
        ca = (self.place.pki / "ca.crt").read_bytes()
        self.apply(*objects.rights(name, namespace))
        return pki.write_kubeconfig(path, pki.kubeconfig(server, ca, pair, namespace))

    def kubectl(self, *arguments: str, kubeconfig: Path | None = None, input: str = "") -> str:
        """The output of kubectl; if it fails, a LabError with its error output."""
        command = [*self.kubectl_command(kubeconfig), *arguments]
        result = subprocess.run(command, input=input, capture_output=True, text=True)
        if result.returncode:
            raise LabError(f"kubectl {' '.join(arguments)}: {result.stderr.strip()}")
        return result.stdout

    def kubectl_command(self, kubeconfig: Path | None = None) -> list[str]:
        return [str(self.parts.program("kubectl")), f"--kubeconfig={kubeconfig or self.kubeconfig()}"]

    def get(self, *arguments: str, kubeconfig: Path | None = None) -> Any:
        """The output of `kubectl get`, parsed."""
        return json.loads(self.kubectl("get", *arguments, "--output=json", kubeconfig=kubeconfig))

    def apply(self, *resources: Mapping[str, Any], kubeconfig: Path | None = None) -> None:
        resource_list = {"apiVersion": "v1", "kind": "List", "items": list(resources)}
        self.kubectl("apply", "--filename=-", input=json.dumps(resource_list), kubeconfig=kubeconfig)

    def requests(self, user: str) -> list[dict[str, Any]]:
        """All requests of this user, from the audit log of the API server."""
        lines = (self.logs / control.AUDIT).read_text().splitlines()
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        return [entry for entry in entries if entry["user"]["username"] == user and entry["stage"] == "RequestReceived"]

    def ready(self) -> dict[str, bool]:
        """Whether each node is Ready, according to the API server."""
        ready = {}
        for node in self.get("nodes")["items"]:
            conditions = {each["type"]: each["status"] for each in node["status"].get("conditions", ())}
            ready[node["metadata"]["name"]] = conditions.get("Ready") == "True"
        return ready

    def wait_ready(self, *nodes: str, limit: float = READY_S) -> None:
        names = nodes or tuple(self.nodes)
        self._wait(f"{', '.join(names)} Ready", lambda: all(self.ready().get(node) for node in names), limit)

    def wait_dns(self, limit: float = READY_S) -> None:
        def answers() -> bool:
            deployment = self.get("deployment/coredns", "--namespace=kube-system")
            expected = min(int(deployment["spec"]["replicas"]), len(self.nodes))  # one per node
            return int(deployment["status"].get("readyReplicas", 0)) >= expected

        self._wait("DNS answers", answers, limit)

    def _wait(self, description: str, check: Callable[[], bool], limit: float) -> None:
        def quietly() -> bool:
            with contextlib.suppress(LabError):
                return check()
            return False

        eventually(f"{description}; logs: {self.logs}", quietly, limit)

    # ---- injecting failures

    def power_off(self, node: str) -> None:
        """Kills every process of the node immediately; its disk stays."""
        self._ask("power_off", node=node)

    def power_on(self, node: str) -> None:
        self._ask("power_on", node=node)

    def cut(self, node: str) -> None:
        """Disconnects the node from the network."""
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
        """Powers on and reconnects all nodes, waits until they are Ready, and removes extended resources added here."""
        self.start_api()
        for node in self.nodes:
            self.power_on(node)
            self.heal(node)
        self.wait_ready()
        self.wait_dns()
        for node, resource in sorted(self._added):
            self._patch_status(node, resource, None)
        self._added.clear()

    # ---- setup

    def images(self, *names: str) -> None:
        """Loads these images on every running node; missing images are built first."""
        prepare(names)
        self._ask("load", images=names)

    @contextlib.contextmanager
    def namespace(self, name: str, restricted: bool = True) -> Iterator[str]:
        """A temporary namespace; afterwards it has no pods, and the cluster deletes the rest."""
        self._wait(f"an earlier {name} is gone", lambda: name not in self.namespaces(), READY_S)
        self.apply(objects.namespace(name, restricted))
        namespace_option = f"--namespace={name}"
        self._wait("its service account", lambda: bool(self.get("serviceaccount/default", namespace_option)), READY_S)
        try:
            yield name
        finally:
            self.start_api()  # a failed test may have left it stopped
            self.kubectl("delete", "namespace", name, "--wait=false")
            # By force: a pod of a lost node stays until the node is declared dead.
            self.kubectl("delete", "pods", "--all", namespace_option, "--force", "--grace-period=0", "--wait=false")
            # The controller manager deletes the rest 5 s later (a constant): not worth waiting for.
            self._wait(f"{name} has no pods", lambda: not self.get("pods", namespace_option)["items"], GONE_S)
            for volume in self.get("persistentvolumes")["items"]:
                if volume["spec"].get("claimRef", {}).get("namespace") == name:
                    self.kubectl("delete", "persistentvolume", volume["metadata"]["name"], "--wait=false")
            shutil.rmtree(self.place.shared / name, ignore_errors=True)

    def namespaces(self) -> list[str]:
        return [each["metadata"]["name"] for each in self.get("namespaces")["items"]]

    def simulate(self, nodes: int, start_s: float = 0.0) -> None:
        """Adds simulated nodes (see lab.simulated); a pod on one runs `start_s` seconds after it is scheduled."""
        self._ask("simulate", program=str(components.simulator()), start_s=start_s)
        simulated_nodes = [simulated.node(number) for number in range(1, nodes + 1)]
        self.apply(*simulated_nodes)
        self.wait_ready(*(str(each["metadata"]["name"]) for each in simulated_nodes))

    def quota(self, namespace: str, hard: Mapping[str, str]) -> None:
        self.apply(objects.quota(namespace, hard))

    def extended_resources(self, node: str, resources: Mapping[str, int]) -> None:
        """Such as {"nvidia.com/gpu": 8}: the scheduler counts them, but no such device exists."""
        for resource, amount in resources.items():
            self._patch_status(node, resource, str(amount))
            self._added.add((node, resource))

    def _patch_status(self, node: str, resource: str, amount: str | None) -> None:
        status = {"status": {"capacity": {resource: amount}, "allocatable": {resource: amount}}}
        self.kubectl("patch", "node", node, "--subresource=status", "--type=merge", f"--patch={json.dumps(status)}")

    @contextlib.contextmanager
    def reserved(self, node: str, resources: Mapping[str, str]) -> Iterator[None]:
        """Temporarily reserves resources of the node (cpu, memory), so that pods cannot use them."""
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
        allocatable = self.get(f"node/{node}")["status"]["allocatable"]
        return allocatable["cpu"], allocatable["memory"]

    def shared_volume(self, namespace: str, claim: str, size: str = "1Gi") -> Path:
        """Creates a claim that all pods on all nodes can write to; returns the folder behind it."""
        return self._volume(namespace, claim, size, self.place.shared / namespace / claim, "")

    def local_volume(self, namespace: str, claim: str, node: str, size: str = "1Gi") -> Path:
        """Creates a claim that binds its pods to one node; returns the folder behind it."""
        return self._volume(namespace, claim, size, self.place.shared / namespace / f"{claim}-on-{node}", node)

    def _volume(self, namespace: str, claim: str, size: str, folder: Path, node: str) -> Path:
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        self.apply(*objects.volume(namespace, claim, folder, size, node))
        return folder

    def _ask(self, verb: str, **arguments: Any) -> Any:
        message = None
        with self._asking, contextlib.suppress(OSError):
            self._line.send({"do": verb, **arguments})
            message = self._line.receive()
        if message is None:
            raise LabError(f"cluster {self.name} has ended; logs: {self.logs}")
        if "error" in message:
            raise LabError(f"{verb}: {message['error']}")
        return message["answer"]


def prepare(names: tuple[str, ...] | None = None) -> None:
    """Builds what is missing: all components, and these images (default: all images)."""
    images.build(components.build(), (*images.BOOT, *(images.IMAGES if names is None else names)))


def eventually(description: str, check: Callable[[], bool], limit: float) -> None:
    until = time.monotonic() + limit
    while not check():
        if time.monotonic() > until:
            raise LabError(f"not within {limit:g} s: {description}")
        time.sleep(0.1)


def _start(settings: Settings) -> tuple[wire.Line, subprocess.Popen[bytes], Place]:
    """Starts the keeper, which starts everything else; returns our end of its first connection."""
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
    keeper_settings = Settings(**{**vars(settings), "first": theirs.fileno()})
    with alive, theirs, (place.logs / "cluster.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.lab.keeper", keeper_settings.to_json(), str(alive.fileno())],
            env={**os.environ, "PYTHONPATH": str(TESTS)}, start_new_session=True,
            pass_fds=(theirs.fileno(), alive.fileno()), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    return wire.Line(ours), process, place


def make_room_for_logs(place: Place) -> None:
    """Deletes old logs; keeps those of running clusters and of the last few that ended."""
    shutil.rmtree(place.logs, ignore_errors=True)
    place.logs.mkdir(parents=True)
    ended: list[tuple[float, Path]] = []
    for path in place.logs.parent.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another starting cluster may delete it at the same time
            if not Place(path.name).alive.exists():
                ended.append((path.stat().st_mtime, path))
    for _, old in sorted(ended, reverse=True)[KEPT_LOGS:]:
        shutil.rmtree(old, ignore_errors=True)
