"""The init container of a serving pod: fetches a snapshot and turns it into a model with the job's export command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.agent.code_unpacking import UnpackError, unpack
from paceline.agent.pod import CANNOT, SETTINGS, join_parts, plan_path, report_failure
from paceline.agent.tasks import variable_references
from paceline.agent.tasks.python_command import parse_command, with_program_found
from paceline.frameworks import amx_probe
from paceline.plan import Plan, from_data
from paceline.runtime.model_folder import FILES, CannotExport, complete
from paceline.storage.snapshots.manifest import Damaged, Gone, Newer, SnapshotId, parse_id
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores import obstore_library
from paceline.storage.stores.locations import open_store
from paceline.storage.stores.protocol import StoreError

RETRY = 1  # exit code if a retry may help
TRIES = 3  # snapshots to try: the newest may be deleted before it is fetched
# The path of the metrics of Paceline's own server.
MONITORING = 'prometheus_config { enable: true, path: "/metrics" }\n'


def main() -> int:
    settings = json.loads(os.environ.pop(SETTINGS))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))  # PID 1 has no default handler
    try:
        export(settings)
    except (CannotExport, Damaged, Newer, UnpackError, ValueError) as error:
        return report_failure(str(error), settings["last_words"], CANNOT)
    except (OSError, StoreError) as error:
        return report_failure(str(error), settings["last_words"], RETRY)
    return 0


def export(settings: dict[str, Any]) -> None:
    with open(plan_path(settings["plan"], settings["folder"])) as file:
        plan = from_data(json.load(file))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    if settings["obstore"] and not obstore_library.is_here():
        environment["PACELINE_OBSTORE"] = folder = f"{settings['folder']}/{obstore_library.FOLDER}"
        if not os.path.isdir(folder):
            obstore_library.unpack(join_parts(settings["obstore"], settings["folder"]), folder)
        obstore_library.use(folder)
    os.environ.update(next(role.env for role in plan.roles if role.decides))  # it may configure the bucket
    id, snapshot_folder = _fetch(settings)
    if settings["code"]:
        parts = sorted(name for name in os.listdir(settings["code"]) if not name.startswith("."))
        unpack([f"{settings['code']}/{name}" for name in parts], settings["work"])
    shutil.rmtree(settings["to"], ignore_errors=True)  # left by an earlier attempt
    model = f"{settings['to']}/{id.step}"  # the step is the version of the model
    os.makedirs(model)
    environment["PACELINE_RUN"] = settings["run"]
    environment["PACELINE_RESTORE"] = snapshot_folder
    environment["PACELINE_EXPORT_DIR"] = model
    _run_export(plan, environment, settings["work"] or os.getcwd())
    metadata = complete(Path(model), settings["run"], id.step)
    if settings["format"] not in ("", metadata["format"]):
        raise CannotExport(
            f"the job's export wrote {FILES[metadata['format']]}, but TensorFlow Serving needs a SavedModel; set "
            "serve.image to an image with paceline[serve]"
        )
    if settings["monitoring"]:
        Path(settings["monitoring"]).write_text(MONITORING)
    shutil.rmtree(snapshot_folder)
    print(f"exported {id} of {settings['run']} to {model}: {metadata['format']}", flush=True)


def _fetch(settings: dict[str, Any]) -> tuple[SnapshotId, str]:
    """Fetches the requested snapshot. If the run has deleted it, and it is not pinned, fetches the newest one."""
    id = parse_id(settings["snapshot"])
    if id is None:
        raise ValueError(f"{settings['snapshot']} is not a snapshot id")
    snapshots = SnapshotRepository(open_store(settings["place"]), settings["run"])
    for _ in range(TRIES):
        folder = f"{settings['folder']}/{id}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            snapshots.fetch(snapshots.manifest(id), folder)
            return id, folder
        except Gone as error:
            problem = f"{id} of {settings['run']} no longer exists ({error})"
        if settings["pinned"] or snapshots.has(id) or not (current := snapshots.inventory().current()):
            break
        id = current[0]
        print(f"{problem}; serving {id} instead", flush=True)
    raise Gone(problem, remedy="serve another snapshot")


def _run_export(plan: Plan, environment: dict[str, str], work: str) -> None:
    program = plan.programs["export"]
    trust = {"PACELINE_TRUST": "1"} if plan.snapshots.trust else {}
    program_env = variable_references.expand_env(program.env, environment)
    environment = {"PYTHONUNBUFFERED": "1", **environment, **program_env, **trust}
    paths = [*filter(None, [environment.get("PYTHONPATH"), os.path.abspath(sys.argv[0])])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment.update(amx_probe.environment(environment))
    interpreter = shutil.which("python") or sys.executable
    command = variable_references.expand_command(program.command, environment)
    python = parse_command(command, interpreter, environment.get("PATH"), work)
    try:
        argv = python.argv if python is not None else with_program_found(command, interpreter, environment.get("PATH"))
        code = subprocess.call(argv, cwd=work, env=environment, timeout=plan.limits.start)
    except subprocess.TimeoutExpired:
        raise CannotExport(f"the job's export did not end within {plan.limits.start:g} s (limits.start)") from None
    except OSError as error:
        raise CannotExport(f"the job's export cannot be started: {program.command[0]}: {error.strerror}") from None
    if code:
        outcome = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise CannotExport(f"the job's export {outcome}")
