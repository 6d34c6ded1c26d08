"""Pods of a run on this machine: their first process as a cluster starts it, with folders in the place of volumes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import plan as plans
from paceline.agent import pod
from paceline.agent.machine import free_port
from paceline.backends import certificates
from paceline.backends.kubernetes import pods, render
from paceline.backends.kubernetes.archive import agent_archive
from paceline.backends.kubernetes.code import collect
from paceline.backends.kubernetes.config_maps import agent_parts
from paceline.job import load_text
from support.environment import without

TRAINING = """
import os, sys
import paceline
import beside
print("index", os.environ["PACELINE_INDEX"], "in", os.path.basename(os.getcwd()), beside.WORD, flush=True)
assert not any(name.startswith("PACELINE_POD") for name in os.environ)
paceline.report(step=7)
"""


def in_folders(command: Sequence[str], folders: Mapping[str, Path]) -> list[str]:
    """A container's command, with these folders in the place of those that it names."""
    words = list(command)
    for there, here in folders.items():
        words = [word.replace(there, str(here)) for word in words]
    return words


class Pods:
    """A captain's pod and those of two workers, on this machine, with folders in the place of volumes."""

    def __init__(self, place: Path, program: str = TRAINING, env: Mapping[str, str] | None = None, **job: Any) -> None:
        """`env`: what all pods are given, such as credentials."""
        self.place, self._env = place, env or {}
        self.told: dict[str, Any] = {}  # what pods are told otherwise
        source = place / "source"
        source.mkdir()
        (source / "train.py").write_text(program)
        (source / "beside.py").write_text("WORD = 'sent along'\n")
        fields = {"name": "tiny", "framework": "none", "command": ["python", "train.py"], **job}
        fields |= {"roles": {"worker": {"replicas": 2}}, "kubernetes": {"image": "any"}}
        plan = plans.make(load_text(json.dumps(fields), "job.yaml", source, cluster=True).job)
        objects = render.render(plan, "tiny-0000", b"", tuple(collect(source).chunks(100)))
        self.jobs = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Job"}
        for name in ("agent", "plan", "code"):
            (place / name).mkdir()
        (place / "plan" / "plan.json").write_text(plans.to_json(plan))
        for number, part in enumerate(collect(source).chunks(100)):
            (place / "code" / f"{number:02}").write_bytes(part)
        certificates.make(place / "tls")
        for files in agent_parts(agent_archive()).values():
            for name, part in files.items():
                (place / "agent" / name).write_bytes(part)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.captain = f"127.0.0.1:{probe.getsockname()[1]}"
        self._serve = free_port()
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, job: str, index: int) -> subprocess.Popen[bytes]:
        name = f"{job}-{index}"
        mine = self.place / name
        for folder in ("run", "work"):
            (mine / folder).mkdir(parents=True)
        container = self.jobs[job]["spec"]["template"]["spec"]["containers"][0]
        folders = {pods.AGENT_FOLDER: self.place / "agent", pods.RUN_FOLDER: mine / "run"}
        told = json.loads(next(each["value"] for each in container["env"] if each["name"] == pod.TOLD))
        told |= {name: str(self.place / name) for name in ("plan", "tls")}
        told |= {"captain": self.captain, "folder": str(mine / "run"), "last_words": str(mine / "last-words")}
        told |= self.told
        told["obstore"] = ""  # this interpreter has it
        if told["role"] == "captain":
            told |= {"serve": self._serve, "snapshots": str(self.place / "claim") if told["snapshots"] else ""}
        else:
            told |= {"work": str(mine / "work"), "code": str(self.place / "code")}
            told["snapshots"] = told["snapshots"] and f"peer://127.0.0.1:{self._serve}"
        given = without("PACELINE", "PYTHON")
        given |= {pod.TOLD: json.dumps(told), pod.ADDRESS: "127.0.0.1", pod.INDEX: str(index)}
        given |= self._env
        given["TMPDIR"] = str(mine)
        given["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{given['PATH']}"
        with (mine / "stdout").open("wb") as stdout:
            process = subprocess.Popen(
                in_folders(container["command"], folders),
                env=given, cwd=mine, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stdout,
            )  # fmt: skip
        self.started[name] = process
        return process

    def all(self) -> None:
        self.start("tiny-0000", 0)
        for index in (0, 1):
            self.start("tiny-0000-worker", index)

    def codes(self) -> dict[str, int]:
        return {name: process.wait(60) for name, process in self.started.items()}

    def stdout(self, name: str) -> list[str]:
        return (self.place / name / "stdout").read_text().splitlines()

    def last_words(self, name: str) -> dict[str, Any]:
        words: dict[str, Any] = json.loads((self.place / name / "last-words").read_text())
        return words
