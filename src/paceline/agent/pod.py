"""The first process of a pod: puts the code in place, finds out which host this is, and is its agent from there on."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from dataclasses import replace
from typing import Any

from paceline.agent import __main__ as keeper
from paceline.agent.options import Options, endpoint
from paceline.agent.porter import OBSTORE
from paceline.agent.unpack import UnpackError, unpack
from paceline.plan import CAPTAIN, TENSORBOARD, Plan, from_data

TOLD = "PACELINE_POD"  # the environment variable with what the backend says of this pod
ADDRESS = "PACELINE_POD_IP"
UID = "PACELINE_POD_UID"
TOKEN = "PACELINE_JOB_UID"  # of the captain: all its pods are of one Job, and no other run's are
INDEX = "JOB_COMPLETION_INDEX"
CANNOT = 66  # exit code of a pod that cannot be a host
CANNOT_WORDS = "paceline: "  # how its last words begin


def main() -> int:
    told = json.loads(os.environ.pop(TOLD))
    try:
        index, address, uid, token = (os.environ.pop(name, "") for name in (INDEX, ADDRESS, UID, TOKEN))
        options = prepare(told, int(index or 0), address, uid, token)
    except (OSError, UnpackError, ValueError) as error:
        return cannot(str(error), told["last_words"])
    return keeper.main(options)


def prepare(told: dict[str, Any], index: int, address: str, uid: str = "", token: str = "") -> Options:
    """What an agent must know, from what all pods of a Job are told alike, and what sets this one apart."""
    path = plan_path(told["plan"], told["folder"])
    options = Options(
        told["run"],
        CAPTAIN,
        path,
        told["folder"],
        told["tls"],
        told["captain"],
        echo=True,
        last_words=told["last_words"],
        lease=told["lease"],
    )
    every = "[::]" if ":" in address else "0.0.0.0"
    if told["role"] == CAPTAIN:
        serve = f"{every}:{told['serve']}" if told["serve"] else ""
        listen = f"{every}:{endpoint(told['captain'])[1]}"
        obstore = joined(told["obstore"], f"{told['folder']}/served/{told['run']}") if told["obstore"] else ""
        return replace(
            options, listen=listen, address=address, snapshots=told["snapshots"], serve=serve, obstore=obstore,
            origin=told["origin"], token=token,
        )  # fmt: skip
    python = shutil.which("python") or sys.executable
    if told["role"] == TENSORBOARD:
        listen = f"{every}:{endpoint(told['tensorboard'])[1]}"
        return replace(options, host=TENSORBOARD, listen=listen, interpreter=python)
    with open(path) as file:
        plan = from_data(json.load(file))
    if told["code"]:
        parts = sorted(name for name in os.listdir(told["code"]) if not name.startswith("."))
        unpack([f"{told['code']}/{name}" for name in parts], told["work"])
    host = plan.host(f"{told['role']}-host-{told['first'] + index}")
    return replace(
        options,
        host=host.name,
        address=_address(plan, told, index, address),
        place=uid,
        work=told["work"] or os.getcwd(),
        library=os.path.abspath(sys.argv[0]),
        interpreter=python,
        cores=host.cpu if host.cpu is not None else _cores(),
        devices=tuple(str(device) for device in range(host.gpus)),
        tensorboard=told["tensorboard"],
        snapshots=told["snapshots"],
        obstore=told["obstore"],
        ingest=told.get("ingest", ""),
    )


def joined(source: str, folder: str) -> str:
    """The parts of an archive, in one file."""
    os.makedirs(folder, exist_ok=True)
    path = f"{folder}/{OBSTORE}"
    with open(path, "wb") as whole:
        for name in sorted(name for name in os.listdir(source) if not name.startswith(".")):
            with open(f"{source}/{name}", "rb") as part:
                shutil.copyfileobj(part, whole)
    return path


def plan_path(source: str, folder: str) -> str:
    """The path of plan.json; where that was too long for a ConfigMap, it came packed."""
    path = f"{source}/plan.json"
    if os.path.exists(path):
        return path
    with gzip.open(f"{path}.gz", "rb") as packed, open(f"{folder}/plan.json", "wb") as target:
        shutil.copyfileobj(packed, target)
        return target.name


def _address(plan: Plan, told: dict[str, Any], index: int, own: str) -> str:
    """A chief holds on to the addresses of its servers, so they are names: those outlive a pod."""
    if plan.strategy == "parameter-server":
        return f"{told['job']}-{index}.{told['run']}"
    return f"[{own}]" if ":" in own else own


def _cores() -> float:
    return float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def cannot(why: str, place: str, code: int = CANNOT) -> int:
    why = f"{CANNOT_WORDS}{why}"
    print(why, flush=True)
    try:
        with open(place, "w") as file:
            file.write(why[:4000])
    except OSError:
        pass
    return code
