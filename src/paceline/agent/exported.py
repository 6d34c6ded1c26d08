"""The first container of a pod that serves: fetches a snapshot, and makes a model of it by the job's export."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.agent.command import understand
from paceline.agent.pod import CANNOT, TOLD, cannot, joined, plan_path
from paceline.agent.unpack import UnpackError, unpack
from paceline.frameworks import amx
from paceline.plan import Plan, from_data
from paceline.runtime.exporting import FILES, CannotExport, complete
from paceline.storage import library
from paceline.storage.manifest import Damaged, Gone, Id, Newer, parse_id
from paceline.storage.places import open_store
from paceline.storage.snapshots import Snapshots
from paceline.storage.store import StoreError

AGAIN = 1  # exit code where another try may help
TRIES = 3  # snapshots: the newest may be deleted before it is fetched
# Where those of Paceline's own server are.
MONITORING = 'prometheus_config { enable: true, path: "/metrics" }\n'


def main() -> int:
    told = json.loads(os.environ.pop(TOLD))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))  # the first process of a container
    try:
        export(told)
    except (CannotExport, Damaged, Newer, UnpackError, ValueError) as error:
        return cannot(str(error), told["last_words"], CANNOT)
    except (OSError, StoreError) as error:
        return cannot(str(error), told["last_words"], AGAIN)
    return 0


def export(told: dict[str, Any]) -> None:
    with open(plan_path(told["plan"], told["folder"])) as file:
        plan = from_data(json.load(file))
    given = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    if told["obstore"] and not library.is_here():
        given["PACELINE_OBSTORE"] = folder = f"{told['folder']}/{library.FOLDER}"
        if not os.path.isdir(folder):
            library.unpack(joined(told["obstore"], told["folder"]), folder)
        library.use(folder)
    os.environ.update(next(role.env for role in plan.roles if role.decides))  # it may say where the bucket is
    id, restored = _fetch(told)
    if told["code"]:
        parts = sorted(name for name in os.listdir(told["code"]) if not name.startswith("."))
        unpack([f"{told['code']}/{name}" for name in parts], told["work"])
    shutil.rmtree(told["to"], ignore_errors=True)  # of a try before
    model = f"{told['to']}/{id.step}"  # its version
    os.makedirs(model)
    more = {"PACELINE_RUN": told["run"], "PACELINE_RESTORE": restored, "PACELINE_EXPORT_DIR": model}
    _run(plan, {**given, **more}, told["work"] or os.getcwd())
    about = complete(Path(model), told["run"], id.step)
    if told["format"] not in ("", about["format"]):
        raise CannotExport(
            f"the job's export has left {FILES[about['format']]}, and TensorFlow Serving takes a SavedModel: name "
            "another serve.image, one with paceline[serve]"
        )
    if told["monitoring"]:
        Path(told["monitoring"]).write_text(MONITORING)
    shutil.rmtree(restored)
    print(f"{id} of {told['run']} is exported to {model}: {about['format']}", flush=True)


def _fetch(told: dict[str, Any]) -> tuple[Id, str]:
    """The snapshot, or where the run that goes on has deleted it, and nobody asked for just that one, the newest."""
    id = parse_id(told["snapshot"])
    if id is None:
        raise ValueError(f"{told['snapshot']} is no snapshot")
    snapshots = Snapshots(open_store(told["place"]), told["run"])
    for _ in range(TRIES):
        folder = f"{told['folder']}/{id}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            snapshots.fetch(snapshots.manifest(id), folder)
            return id, folder
        except Gone as error:
            gone = f"{id} of {told['run']} is not there any more ({error})"
        if told["pinned"] or snapshots.has(id) or not (counted := snapshots.known().counted()):
            break
        id = counted[0]
        print(f"{gone}: {id} is served in its place", flush=True)
    raise Gone(f"{gone}: serve another one")


def _run(plan: Plan, given: dict[str, str], work: str) -> None:
    program = plan.programs["export"]
    trust = {"PACELINE_TRUST": "1"} if plan.snapshots.trust else {}
    given = {"PYTHONUNBUFFERED": "1", **given, **program.env, **trust}
    paths = [*filter(None, [given.get("PYTHONPATH"), os.path.abspath(sys.argv[0])])]
    given["PYTHONPATH"] = os.pathsep.join(paths)
    given.update(amx.environment(given))
    python = understand(program.command, shutil.which("python") or sys.executable, given.get("PATH"), work)
    try:
        argv = python.argv if python is not None else program.command
        code = subprocess.call(argv, cwd=work, env=given, timeout=plan.limits.start)
    except subprocess.TimeoutExpired:
        raise CannotExport(f"the job's export has not ended within {plan.limits.start:g} s (limits.start)") from None
    except OSError as error:
        raise CannotExport(f"the job's export cannot be started: {program.command[0]}: {error.strerror}") from None
    if code:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise CannotExport(f"the job's export {how}")
