"""MLflow servers for tests: the API as far as Paceline uses it, in this process, and the real one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit
from urllib.request import urlopen

from support.environment import without
from support.lab.places import PROJECT, cache, key, made_once
from support.loopback_server import LoopbackServer, SilentHandler
from support.ports import free_port
from support.runs import eventually

REQUIREMENTS = PROJECT / "requirements" / "mlflow.txt"

Fields = dict[str, Any]


class FakeServer(LoopbackServer):
    """In memory. `failures`: statuses of the next answers, before requests are carried out (or after: `lost`)."""

    def __init__(self) -> None:
        self.failures: list[int] = []
        self.lost = 0  # the next requests are carried out, but their answers are 503
        self.requests: list[str] = []
        self.authorizations: set[str | None] = set()
        self.experiments: list[str] = []
        self.runs: list[Fields] = []
        server = self

        class Handler(SilentHandler):
            def _answer(self) -> None:
                address = urlsplit(self.path)
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fields = json.loads(data) if data else dict(parse_qsl(address.query))
                name = address.path.removeprefix("/api/2.0/mlflow/")
                server.requests.append(name)
                server.authorizations.add(self.headers.get("Authorization"))
                status = server.failures.pop(0) if server.failures else 200
                answer = server.answer(name, fields) if status == 200 else {"message": "as told"}
                if server.lost and status == 200:
                    server.lost -= 1
                    status = 503
                status = answer.pop("status", status)
                status = 404 if answer.get("error_code") == "RESOURCE_DOES_NOT_EXIST" else status
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = _answer

        super().__init__(Handler)

    def points(self, key: str) -> list[tuple[int, float]]:
        """Step and value of each number that was logged, in order."""
        return [(each["step"], each["value"]) for each in self.runs[0]["metrics"] if each["key"] == key]

    def answer(self, name: str, fields: Fields) -> Fields:
        if name == "experiments/get-by-name":
            if fields["experiment_name"] not in self.experiments:
                return {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"}
            return {"experiment": {"experiment_id": str(self.experiments.index(fields["experiment_name"]))}}
        if name == "experiments/create":
            self.experiments.append(fields["name"])
            return {"experiment_id": str(len(self.experiments) - 1)}
        if name == "runs/search":
            tag, value = (part.strip("`'") for part in fields["filter"].removeprefix("tags.").split(" = "))
            return {"runs": [_shown(run) for run in self.runs if run["tags"].get(tag) == value]}
        if name == "runs/create":
            tags = {tag["key"]: tag["value"] for tag in fields["tags"]}
            run = {**fields, "id": f"run{len(self.runs)}", "tags": tags, "metrics": [], "params": {}}
            self.runs.append(run)
            return {"run": _shown(run)}
        run = next(run for run in self.runs if run["id"] == fields["run_id"])
        if name == "runs/get":
            return {"run": _shown(run)}
        if name == "runs/log-batch":
            assert len(fields.get("metrics", [])) <= 1000
            assert len(fields.get("params", [])) <= 100
            run["metrics"] += fields.get("metrics", [])
            run["params"].update({each["key"]: each["value"] for each in fields.get("params", [])})
            run["tags"].update({each["key"]: each["value"] for each in fields.get("tags", [])})
            return {}
        assert name == "runs/update", name
        run.update(status=fields["status"], end_time=fields["end_time"])
        return {}


def _shown(run: Fields) -> Fields:
    highest: dict[str, Fields] = {}
    for each in run["metrics"]:
        if each["step"] >= highest.get(each["key"], {"step": -1})["step"]:
            highest[each["key"]] = each
    return {"info": {"run_id": run["id"]}, "data": {"metrics": list(highest.values())}}


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    try:
        yield server
    finally:
        server.close()


@dataclass
class RealServer:
    url: str
    process: subprocess.Popen[bytes]

    def get(self, name: str, **query: str) -> Fields:
        with urlopen(f"{self.url}/api/2.0/mlflow/{name}?{urlencode(query)}", timeout=60) as answer:
            fields: Fields = json.load(answer)
        return fields


@contextmanager
def real_server(folder: Path) -> Iterator[RealServer]:
    """MLflow's own server, with a SQLite database; in an environment of its own, because of its many requirements."""
    python = _environment() / "bin" / "python"
    port = free_port()
    env = {
        **without("PACELINE", "PYTEST", "MLFLOW"),
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{folder}/mlflow.db",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": str(folder / "artifacts"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    env.pop("PYTHONPATH", None)
    with (folder / "mlflow.log").open("wb") as log:
        server = subprocess.Popen([python, "-c", _SERVER, str(port)], env=env, cwd=folder, stdout=log, stderr=log)
    try:

        def listens() -> bool:
            assert server.poll() is None, (folder / "mlflow.log").read_text()[-3000:]
            with socket.socket() as connection:
                return connection.connect_ex(("127.0.0.1", port)) == 0

        eventually("MLflow's server listens", listens, 120, lambda: (folder / "mlflow.log").read_text()[-3000:])
        yield RealServer(f"http://127.0.0.1:{port}", server)
    finally:
        server.kill()
        server.wait()


# `mlflow server` starts several processes, each of which imports everything; this is the same application in one.
_SERVER = """
import sys
from mlflow.server import app
from werkzeug.serving import make_server
make_server("127.0.0.1", int(sys.argv[1]), app, threaded=True).serve_forever()
"""


def _environment() -> Path:
    """Built once for each version of the requirements."""

    def build(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
        install = [
            "pip",
            "install",
            "--quiet",
            "--no-config",
            "--no-deps",
            "--require-hashes",
            f"--requirements={REQUIREMENTS}",
        ]
        subprocess.run([PROJECT / ".tools/bin/uv", *install, f"--python={folder}"], check=True, timeout=500)

    return made_once(cache().parent / f"paceline-mlflow-{key(REQUIREMENTS.read_bytes(), sys.version)}", build)
