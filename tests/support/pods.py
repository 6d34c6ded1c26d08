"""Pods of a run on this machine: their first process as a cluster starts it, with folders instead of volumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import plan as plans
from paceline.agent import pod
from paceline.backends import certificates
from paceline.backends.kubernetes.objects import pods, run_objects
from paceline.backends.kubernetes.objects.config_maps import agent_parts
from paceline.backends.kubernetes.payload.agent_archive import agent_archive
from paceline.backends.kubernetes.payload.code_archive import collect
from paceline.job import load_text, planning
from support.environment import without
from support.ports import free_port

TRAINING = """
import os, sys
import paceline
import beside
print("index", os.environ["PACELINE_INDEX"], "in", os.path.basename(os.getcwd()), beside.WORD, flush=True)
assert not any(name.startswith("PACELINE_POD") for name in os.environ)
paceline.report(step=7)
"""


def in_folders(command: Sequence[str], folders: Mapping[str, Path]) -> list[str]:
    """A container's command, with its mount paths replaced by these folders."""
    arguments = list(command)
    for mount_path, folder in folders.items():
        arguments = [argument.replace(mount_path, str(folder)) for argument in arguments]
    return arguments


class Pods:
    """The pods of a captain and two workers, on this machine, with folders instead of volumes."""

    def __init__(self, root: Path, program: str = TRAINING, env: Mapping[str, str] | None = None, **job: Any) -> None:
        """`env`: extra environment variables of all pods, such as credentials."""
        self.place, self._env = root, env or {}
        self.overrides: dict[str, Any] = {}  # of the settings of pods
        source = root / "source"
        source.mkdir()
        (source / "train.py").write_text(program)
        (source / "beside.py").write_text("WORD = 'sent along'\n")
        fields = {"name": "tiny", "framework": "none", "command": ["python", "train.py"], **job}
        fields.pop("worker", None)
        fields |= {
            "roles": {"worker": {"replicas": 2, **job.get("worker", {})}},
            "kubernetes": {"image": "any", **job.get("kubernetes", {})},
        }
        plan = planning.make_plan(load_text(json.dumps(fields), "job.yaml", source, cluster=True).job)
        objects = run_objects.render(plan, "tiny-0000", b"", tuple(collect(source).chunks(100)))
        self.jobs = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Job"}
        for name in ("agent", "plan", "code"):
            (root / name).mkdir()
        (root / "plan" / "plan.json").write_text(plans.to_json(plan))
        for number, part in enumerate(collect(source).chunks(100)):
            (root / "code" / f"{number:02}").write_bytes(part)
        certificates.make(root / "tls")
        for files in agent_parts(agent_archive()).values():
            for name, part in files.items():
                (root / "agent" / name).write_bytes(part)
        self.captain = f"127.0.0.1:{free_port()}"
        self._serve = free_port()
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, job: str, index: int) -> subprocess.Popen[bytes]:
        name = f"{job}-{index}"
        own = self.place / name
        for folder in ("run", "work"):
            (own / folder).mkdir(parents=True, exist_ok=True)  # it exists if its container is restarted
        container = self.jobs[job]["spec"]["template"]["spec"]["containers"][0]
        folders = {pods.AGENT_FOLDER: self.place / "agent", pods.RUN_FOLDER: own / "run"}
        settings = json.loads(next(each["value"] for each in container["env"] if each["name"] == pod.SETTINGS))
        settings |= {name: str(self.place / name) for name in ("plan", "tls")}
        settings |= {
            "captain": self.captain,
            "folder": str(own / "run"),
            "last_words": str(own / "last-words"),
        }
        settings |= self.overrides
        settings["obstore"] = ""  # this interpreter has it
        if settings["role"] == "captain":
            settings |= {"serve": self._serve, "snapshots": str(self.place / "claim") if settings["snapshots"] else ""}
        else:
            settings |= {"work": str(own / "work"), "code": str(self.place / "code")}
            if settings.get("memory"):
                (own / "memory").mkdir(exist_ok=True)
                settings["memory"] = str(own / "memory")
            settings["snapshots"] = settings["snapshots"] and f"peer://127.0.0.1:{self._serve}"
        env = without("PACELINE", "PYTHON")
        env |= {pod.SETTINGS: json.dumps(settings), pod.ADDRESS: "127.0.0.1", pod.INDEX: str(index)}
        env |= self._env
        env["TMPDIR"] = str(own)
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        with (own / "stdout").open("ab") as stdout:
            process = subprocess.Popen(
                in_folders(container["command"], folders),
                env=env, cwd=own, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stdout,
            )  # fmt: skip
        self.started[name] = process
        return process

    def all(self) -> None:
        self.start("tiny-0000", 0)
        for index in (0, 1):
            self.start("tiny-0000-worker", index)

    def codes(self) -> dict[str, int]:
        return {name: process.wait(150) for name, process in self.started.items()}

    def stdout(self, name: str) -> list[str]:
        """The lines so far: the pod may be writing the last one."""
        return (self.place / name / "stdout").read_text(errors="replace").split("\n")[:-1]

    def last_words(self, name: str) -> dict[str, Any]:
        message: dict[str, Any] = json.loads((self.place / name / "last-words").read_text())
        return message
