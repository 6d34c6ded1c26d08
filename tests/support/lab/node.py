"""A node seen from outside: power, network, images and reserved resources."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.lab import cgroups, namespaces, network

OFF_S = 10.0


@dataclass(frozen=True)
class Machine:
    """The settings that a node needs to boot; its disk survives a power failure."""

    name: str
    number: int
    disk: Path
    logs: Path
    pki: Path
    cgroup: str
    path: str
    cni: Path
    runc: Path
    images: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        fields: dict[str, Any] = json.loads(text)
        for name in ("disk", "logs", "pki", "cni", "runc"):
            fields[name] = Path(fields[name])
        return cls(**{**fields, "images": tuple(fields["images"])})

    def reserved(self) -> dict[str, str]:
        path = self._reserved
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def reserve(self, resources: Mapping[str, str]) -> None:
        self.disk.mkdir(parents=True, exist_ok=True)
        self._reserved.write_text(json.dumps(dict(resources)))

    @property
    def _reserved(self) -> Path:
        return self.disk / "reserved.json"


class Node:
    """A node of the cluster; the caller must run in the cluster's namespaces."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_on(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def power_on(self) -> None:
        if self.is_on:
            return
        cgroups.create(self.machine.cgroup)
        namespace = network.plug_in(self.machine.number)
        command = [
            # Not `ip netns exec`: it remounts /sys, and the kubelet then finds no cgroups.
            "nsenter", f"--net={namespace}", *namespaces.NEW, "--uts",
            sys.executable, "-m", "support.lab.boot", self.machine.to_json(),
        ]  # fmt: skip
        self.machine.logs.mkdir(parents=True, exist_ok=True)
        with (self.machine.logs / "boot.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def power_off(self) -> None:
        """Sends SIGKILL to its PID 1: the kernel kills every process of the node, without notice."""
        if self._process is None:
            return
        namespaces.end(self._process, OFF_S)
        self._process = None
        network.unplug(self.machine.number)
        # A rebooted machine has no old cgroups; if they remained, its kubelet would need 3 s for each dead container.
        cgroups.remove(self.machine.cgroup)

    def load(self, images: Sequence[str]) -> None:
        """Imports these images into its containerd."""
        self._enter(sys.executable, "-m", "support.lab.store", *images)

    def restart_kubelet(self) -> None:
        """Kills the kubelet; the node's PID 1 restarts it."""
        self._enter("sh", "-c", "kill $(cat /run/kubelet.pid)")

    def _enter(self, *command: str) -> None:
        if self._process is None or not self.is_on:
            raise RuntimeError(f"{self.machine.name} is off")
        pid = namespaces.first_process(self._process)
        env = {**os.environ, "PATH": self.machine.path}
        nsenter = ["nsenter", f"--target={pid}", "--mount", "--pid", "--net", "--uts"]
        result = subprocess.run([*nsenter, *command], env=env, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{self.machine.name}: {' '.join(command)}: {result.stderr[-2000:]}")
