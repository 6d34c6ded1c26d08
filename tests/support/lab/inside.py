"""PID 1 of a cluster: starts control plane and nodes, does what it is asked, and takes all with it when it ends."""

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

LIMIT_S = 60.0


@dataclass(frozen=True)
class Settings:
    """What a cluster is to be; the numbers are file descriptors that the first process outside has opened."""

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
        self.wanting: set[Line] = set()
        self.counting = threading.Lock()
        self.one_at_a_time = threading.Lock()

    def _machine(self, number: int) -> Machine:
        name = f"n{number}"
        return Machine(
            name=name, number=number, disk=self.place.disk(name), logs=self.place.logs / name, pki=self.place.pki,
            cgroup=cgroups.name(self.place.name, name), path=self.parts.path, cni=self.parts.cni, runc=self.parts.runc,
            images=(*images.BOOT, *self.settings.images),
        )  # fmt: skip

    # ---- coming up

    def bring_up(self) -> None:
        # What would be written to the machine's own /run: the names of network namespaces.
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        network.bring_up()
        listening = socket.socket(fileno=self.settings.api)
        threading.Thread(target=forward, args=(listening,), daemon=True).start()
        self.start("etcd")
        # They boot meanwhile, and wait for the API server by themselves.
        for node in self.nodes.values():
            node.power_on()
        self._until("etcd is healthy", "etcd", control.etcd_ready)
        self.start("kube-apiserver")
        self._until("the API server is ready", "kube-apiserver", lambda: control.api_ready(self.place.pki))
        self.start("kube-controller-manager")
        self.start("kube-scheduler")
        self._kubectl("apply", "--server-side", "--filename", str(LAB / "addons.yaml"))

    def _until(self, what: str, program: str, check: Callable[[], bool]) -> None:
        until = time.monotonic() + LIMIT_S
        while not check():
            ended = self.running[program].poll()
            if ended is not None or time.monotonic() > until:
                how = f"{program} ended with {ended}" if ended is not None else f"not within {LIMIT_S:g} s"
                log = (self.place.logs / f"{program}.log").read_text(errors="replace")
                raise RuntimeError(f"waiting until {what}: {how}\n{log[-2000:]}")
            time.sleep(0.05)

    def _kubectl(self, *words: str) -> None:
        config = f"--kubeconfig={self.place.pki}/inside.kubeconfig"
        done = subprocess.run(["kubectl", config, *words], env=self.env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(words)}: {done.stderr}")

    # ---- what it can be asked to do

    def start(self, program: str) -> None:
        if program in self.running and self.running[program].poll() is None:
            return
        with (self.place.logs / f"{program}.log").open("ab") as log:
            self.running[program] = subprocess.Popen(
                self.commands[program], env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def stop(self, program: str) -> None:
        """As if it crashed."""
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

    # ---- who wants it

    def listen(self) -> None:
        listening = socket.socket(fileno=self.settings.control)
        while True:
            connected, _ = listening.accept()
            threading.Thread(target=self.serve, args=(Line(connected),), daemon=True).start()

    def serve(self, line: Line) -> None:
        """For as long as the other side is there."""
        with self.counting:
            self.wanting.add(line)
        with contextlib.suppress(OSError):
            while message := line.receive():
                if message["do"] == "leave":
                    line.send({"answer": self._leaves(line)})
                    break
                if message["do"] == "end":
                    line.send({"answer": None})
                    end()
                line.send(self._answer(message))
        self._leaves(line)
        if not self.wanting and not self.settings.stays:
            end()

    def _leaves(self, line: Line) -> bool:
        """Whether the cluster goes with this one."""
        with self.counting:
            self.wanting.discard(line)
            return not self.wanting and not self.settings.stays

    def _answer(self, message: Message) -> Message:
        verb, words = message["do"], {name: value for name, value in message.items() if name != "do"}
        try:
            with self.one_at_a_time:
                return {"answer": VERBS[verb](self, **words)}
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
    """This being PID 1, the kernel ends all the others; mounts and networks go with the last of them."""
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
