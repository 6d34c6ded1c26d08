"""PID 1 of a cluster: starts the control plane and nodes, and executes requests; when it ends, everything ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.lab import cgroups, components, control, images, network, simulated
from support.lab.forward import forward
from support.lab.node import Machine, Node
from support.lab.places import LAB, Place
from support.lab.wire import Line, Message

LIMIT_S = 180.0


@dataclass(frozen=True)
class Settings:
    """The settings of a cluster; `api`, `control` and `first` are file descriptors opened by the keeper."""

    name: str
    nodes: int
    images: tuple[str, ...]
    stays: bool
    api: int
    control: int
    first: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "images": tuple(fields["images"])})


class Inside:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.place = Place(settings.name)
        self.parts = components.build()
        self.env = {**os.environ, "PATH": self.parts.path}
        self.commands = control.commands(self.place.pki, self.place.etcd, self.place.logs)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.nodes = {f"n{number}": Node(self._machine(number)) for number in range(1, settings.nodes + 1)}
        self.connections: set[Line] = set()
        self.counting = threading.Lock()
        self.one_at_a_time = threading.Lock()

    def _machine(self, number: int) -> Machine:
        name = f"n{number}"
        return Machine(
            name=name, number=number, disk=self.place.disk(name), logs=self.place.logs / name, pki=self.place.pki,
            cgroup=cgroups.name(self.place.name, name), path=self.parts.path, cni=self.parts.cni, runc=self.parts.runc,
            images=(*images.BOOT, *self.settings.images),
        )  # fmt: skip

    # ---- startup

    def bring_up(self) -> None:
        # The names of network namespaces would otherwise be written to the machine's own /run.
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        network.bring_up()
        listener = socket.socket(fileno=self.settings.api)
        threading.Thread(target=forward, args=(listener,), daemon=True).start()
        self.start("etcd")
        # The nodes boot in the meantime, and wait for the API server on their own.
        for node in self.nodes.values():
            node.power_on()
        self._until("etcd is healthy", "etcd", control.etcd_ready)
        self.start("kube-apiserver")
        self._until("the API server is ready", "kube-apiserver", lambda: control.api_ready(self.place.pki))
        self.start("kube-controller-manager")
        self.start("kube-scheduler")
        self._kubectl("apply", "--server-side", "--filename", str(LAB / "addons.yaml"))

    def _until(self, description: str, program: str, check: Callable[[], bool]) -> None:
        until = time.monotonic() + LIMIT_S
        while not check():
            exit_code = self.running[program].poll()
            if exit_code is not None or time.monotonic() > until:
                reason = f"{program} ended with {exit_code}" if exit_code is not None else f"not within {LIMIT_S:g} s"
                log = (self.place.logs / f"{program}.log").read_text(errors="replace")
                raise RuntimeError(f"waiting until {description}: {reason}\n{log[-2000:]}")
            time.sleep(0.05)

    def _kubectl(self, *arguments: str) -> None:
        config = f"--kubeconfig={self.place.pki}/inside.kubeconfig"
        result = subprocess.run(["kubectl", config, *arguments], env=self.env, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {result.stderr}")

    # ---- requests

    def start(self, program: str) -> None:
        if program in self.running and self.running[program].poll() is None:
            return
        with (self.place.logs / f"{program}.log").open("ab") as log:
            self.running[program] = subprocess.Popen(
                self.commands[program], env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def stop(self, program: str) -> None:
        """Kills the program, as if it had crashed."""
        self.running[program].kill()
        self.running[program].wait()

    def power_on(self, node: str) -> None:
        self.nodes[node].power_on()

    def power_off(self, node: str) -> None:
        self.nodes[node].power_off()

    def cut(self, node: str) -> None:
        network.cut(self.nodes[node].machine.number)

    def heal(self, node: str) -> None:
        network.heal(self.nodes[node].machine.number)

    def load(self, images: Sequence[str]) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: node.load(images), [node for node in self.nodes.values() if node.is_on]))

    def reserve(self, node: str, resources: Mapping[str, str]) -> None:
        self.nodes[node].machine.reserve(resources)
        self.nodes[node].restart_kubelet()

    def simulate(self, program: str, start_s: float) -> None:
        self.commands[simulated.PROGRAM] = simulated.command(self.place, Path(program), start_s)
        self.start(simulated.PROGRAM)

    def describe(self) -> Message:
        return {"nodes": {name: "on" if node.is_on else "off" for name, node in self.nodes.items()}}

    # ---- connections

    def listen(self) -> None:
        listener = socket.socket(fileno=self.settings.control)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self.serve, args=(Line(connection),), daemon=True).start()

    def serve(self, line: Line) -> None:
        """Handles the requests of one connection until it is closed."""
        with self.counting:
            self.connections.add(line)
        with contextlib.suppress(OSError):
            while message := line.receive():
                if message["do"] == "leave":
                    line.send({"answer": self._disconnect(line)})
                    break
                if message["do"] == "end":
                    line.send({"answer": None})
                    end()
                line.send(self._answer(message))
        self._disconnect(line)
        if not self.connections and not self.settings.stays:
            end()

    def _disconnect(self, line: Line) -> bool:
        """Removes the connection; returns whether the cluster ends with it."""
        with self.counting:
            self.connections.discard(line)
            return not self.connections and not self.settings.stays

    def _answer(self, message: Message) -> Message:
        verb, arguments = message["do"], {name: value for name, value in message.items() if name != "do"}
        try:
            with self.one_at_a_time:
                return {"answer": VERBS[verb](self, **arguments)}
        except Exception as error:
            traceback.print_exc()
            return {"error": str(error)}


VERBS: dict[str, Callable[..., Any]] = {
    "start": Inside.start,
    "stop": Inside.stop,
    "power_on": Inside.power_on,
    "power_off": Inside.power_off,
    "cut": Inside.cut,
    "heal": Inside.heal,
    "load": Inside.load,
    "reserve": Inside.reserve,
    "simulate": Inside.simulate,
    "describe": Inside.describe,
}


def end() -> None:
    """As this is PID 1, the kernel kills all other processes; mounts and networks disappear with the last of them."""
    os._exit(0)


def main(settings: Settings) -> None:
    inside = Inside(settings)
    first = Line(socket.socket(fileno=settings.first))
    threading.Thread(target=inside.serve, args=(first,), daemon=True).start()
    try:
        inside.bring_up()
    except Exception as error:
        traceback.print_exc()
        first.send({"error": str(error)})
        end()
    first.send({"up": True})
    inside.listen()


if __name__ == "__main__":
    main(Settings.from_json(sys.argv[1]))
