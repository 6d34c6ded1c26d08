"""The first process of a pod: unpacks the code, determines the options of its host, and becomes the host's agent."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from dataclasses import replace
from typing import Any

from paceline.agent import __main__ as keeper
from paceline.agent import free_ports, os_processes
from paceline.agent.code_unpacking import UnpackError, unpack
from paceline.agent.options import Options, endpoint
from paceline.agent.redaction import Redactor
from paceline.agent.transfers.porter import OBSTORE
from paceline.plan import CAPTAIN, TENSORBOARD, Plan, from_data

SETTINGS = "PACELINE_POD"  # environment variable with the settings of this pod, as JSON
ADDRESS = "PACELINE_POD_IP"
UID = "PACELINE_POD_UID"
TOKEN = "PACELINE_JOB_UID"  # the captain's pods belong to one Job, which no other run shares
INDEX = "JOB_COMPLETION_INDEX"
CANNOT = 66  # exit code of a pod that cannot become a host
CANNOT_WORDS = "paceline: "  # begins its termination message


def main() -> int:
    settings = json.loads(os.environ.pop(SETTINGS))
    try:
        index, address, uid, token = (os.environ.pop(name, "") for name in (INDEX, ADDRESS, UID, TOKEN))
        options = prepare(settings, int(index or 0), address, uid, token)
    except (OSError, UnpackError, ValueError) as error:
        return report_failure(str(error), settings["last_words"])
    return keeper.main(options)


def prepare(settings: dict[str, Any], index: int, address: str, uid: str = "", token: str = "") -> Options:
    """The agent's options: from the settings that all pods of a Job share, and from what is specific to this pod."""
    path = plan_path(settings["plan"], settings["folder"])
    options = Options(
        settings["run"],
        CAPTAIN,
        path,
        settings["folder"],
        settings["tls"],
        settings["captain"],
        echo=True,
        last_words=settings["last_words"],
        lease=settings["lease"],
    )
    any_address = "[::]" if ":" in address else "0.0.0.0"
    if settings["role"] == CAPTAIN:
        serve = f"{any_address}:{settings['serve']}" if settings["serve"] else ""
        listen = f"{any_address}:{endpoint(settings['captain'])[1]}"
        metrics = f"{any_address}:{settings['metrics']}" if settings.get("metrics") else ""
        obstore = ""
        if settings["obstore"]:
            obstore = join_parts(settings["obstore"], f"{settings['folder']}/served/{settings['run']}")
        return replace(
            options, listen=listen, address=address, snapshots=settings["snapshots"], serve=serve, obstore=obstore,
            origin=settings["origin"], token=token, metrics=metrics,
        )  # fmt: skip
    python = shutil.which("python") or sys.executable
    if settings["role"] == TENSORBOARD:
        listen = f"{any_address}:{endpoint(settings['tensorboard'])[1]}"
        return replace(options, host=TENSORBOARD, listen=listen, interpreter=python)
    with open(path) as file:
        plan = from_data(json.load(file))
    if settings["code"]:
        parts = sorted(name for name in os.listdir(settings["code"]) if not name.startswith("."))
        unpack([f"{settings['code']}/{name}" for name in parts], settings["work"])
    host = plan.host(f"{settings['role']}-host-{settings['first'] + index}")
    parts_port = free_ports.free_port()  # pods may share the network of their node
    return replace(
        options,
        host=host.name,
        address=_address(plan, settings, index, address),
        place=uid,
        work=settings["work"] or os.getcwd(),
        library=os.path.abspath(sys.argv[0]),
        interpreter=python,
        cores=host.cpu if host.cpu is not None else float(os_processes.cores()),
        devices=tuple(str(device) for device in range(host.gpus)),
        tensorboard=settings["tensorboard"],
        snapshots=settings["snapshots"],
        obstore=settings["obstore"],
        ingest=settings.get("ingest", ""),
        memory=settings.get("memory", ""),
        serve=f"{any_address}:{parts_port}",
        peers=f"{_address(plan, settings, index, address)}:{parts_port}",
        compiled=f"{settings['folder']}/compiled",
    )


def join_parts(source: str, folder: str) -> str:
    """Joins the parts of an archive into one file, and returns its path."""
    os.makedirs(folder, exist_ok=True)
    path = f"{folder}/{OBSTORE}"
    with open(path, "wb") as whole:
        for name in sorted(name for name in os.listdir(source) if not name.startswith(".")):
            with open(f"{source}/{name}", "rb") as part:
                shutil.copyfileobj(part, whole)
    return path


def plan_path(source: str, folder: str) -> str:
    """The path of plan.json, after decompressing it if it was too large for a ConfigMap."""
    path = f"{source}/plan.json"
    if os.path.exists(path):
        return path
    with gzip.open(f"{path}.gz", "rb") as packed, open(f"{folder}/plan.json", "wb") as target:
        shutil.copyfileobj(packed, target)
        return target.name


def _address(plan: Plan, settings: dict[str, Any], index: int, own: str) -> str:
    """A DNS name, which outlives the pod, if other tasks continue with the address after a restart."""
    if plan.keeps_addresses:
        return f"{settings['job']}-{index}.{settings['run']}"
    return f"[{own}]" if ":" in own else own


def report_failure(reason: str, message_path: str, code: int = CANNOT) -> int:
    """Prints the reason, writes it as the termination message, and returns the exit code."""
    text = f"{CANNOT_WORDS}{Redactor(os.environ)(reason)}"
    print(text, flush=True)
    try:
        with open(message_path, "w") as file:
            file.write(text[:4000])
    except OSError:
        pass
    return code
