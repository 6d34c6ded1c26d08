"""The model server, as its clients see it: a real process with a real SavedModel behind TensorFlow Serving's paths."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from support.model_servers import Server, answers, load, serving, started
from support.runs import PROGRAMS, Starter, eventually, job

pytestmark = pytest.mark.xdist_group("serve")

RATE, SECONDS, CLIENTS = 100, 30, 16  # requests a second, for so long, by so many connections
COUNT = 1_000_000  # takes the model many seconds, also if this process is delayed meanwhile


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, str(PROGRAMS / "export_toy.py"), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    base = models / "base"
    shutil.copytree(models / "1", base / "1")
    with serving(base, "--most-bytes", "10000") as running:
        yield running


def test_predictions_by_row_and_by_column(server: Server) -> None:
    rows = {"predictions": [{"sum": 3.0, "y": [1.0, 2.0]}, {"sum": 7.0, "y": [3.0, 4.0]}]}
    columns = {"outputs": {"sum": [3.0, 7.0], "y": [[1.0, 2.0], [3.0, 4.0]]}}
    assert server.predict({"instances": [[1, 2], [3, 4]]}).body == rows
    assert server.predict({"instances": [{"x": [1, 2]}, {"x": [3, 4]}]}).body == rows
    assert server.predict({"inputs": [[1, 2], [3, 4]]}).body == columns
    assert server.predict({"inputs": {"x": [[1, 2], [3, 4]]}}, "/versions/1").body == columns


def test_text_and_bytes(server: Server) -> None:
    request = {"signature_name": "repeat", "inputs": {"text": ["a", {"b64": "/w=="}], "n": 2}}
    outputs = server.predict(request).body
    assert outputs == {"outputs": {"text": ["aa", {"b64": "//8="}], "raw_bytes": [{"b64": "YQ=="}, {"b64": "/w=="}]}}


def test_status_and_metadata_are_those_of_tensorflow_serving(server: Server) -> None:
    ok = {"error_code": "OK", "error_message": ""}
    status = {"model_version_status": [{"version": "1", "state": "AVAILABLE", "status": ok}]}
    assert server.get().body == status
    assert server.get("/versions/1").body == status
    metadata = server.get("/metadata").body
    assert metadata["model_spec"] == {"name": "toy", "signature_name": "", "version": "1"}
    signatures = metadata["metadata"]["signature_def"]["signature_def"]
    assert sorted(signatures) == ["count", "repeat", "serving_default"]
    assert signatures["serving_default"]["method_name"] == "tensorflow/serving/predict"
    x_input = signatures["serving_default"]["inputs"]["x"]
    assert x_input["dtype"] == "DT_FLOAT"
    assert x_input["tensor_shape"] == {
        "dim": [{"size": "-1", "name": ""}, {"size": "2", "name": ""}],
        "unknown_rank": False,
    }


X = 'input "x": '
FLOATS = X + "the model takes float32 [-1, 2], got "
N = 'input "n": '
KNOWN = 'use "instances", "inputs" and "signature_name"'


def repeat(text: Any, n: Any) -> dict[str, Any]:
    return {"signature_name": "repeat", "inputs": {"text": text, "n": n}}


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b"{", 400, "the body is not valid JSON: unexpected end of data: line 1 column 2 (char 1)"),
        (b"[1]", 400, 'the body must be an object with "instances" or "inputs"'),
        ({}, 400, 'the body must contain either "instances" or "inputs"'),
        ({"instances": [], "inputs": []}, 400, 'the body must contain either "instances" or "inputs"'),
        ({"instances": []}, 400, '"instances" must be a list of at least one example'),
        ({"instances": [[1, 2], [3]]}, 400, X + "its lists have unequal lengths"),
        ({"instances": [[1, 2, 3]]}, 400, FLOATS + "[1, 3]"),
        ({"instances": [["a", "b"]]}, 400, FLOATS + "text"),
        ({"instances": [[None, 1]]}, 400, FLOATS + "values of mixed types or null"),
        ({"instances": [{"z": 1}]}, 400, 'instance 0 lacks "x"'),
        ({"instances": [{"x": [1, 2], "z": 1}]}, 400, 'instance 0 has unknown "z"; the model takes "x"'),
        ({"instances": [[1, 2]], "signature": "a"}, 400, f'unknown field "signature"; {KNOWN}'),
        (
            {"signature_name": "a", "inputs": 1},
            400,
            'the model has no signature "a"; it has count, repeat, serving_default',
        ),
        (repeat(["a"], 1.5), 400, N + "the model takes int32 [], got fractional numbers"),
        (repeat(["a"], 3_000_000_000), 400, N + "int32 takes -2147483648 to 2147483647"),
        (repeat([{"b64": "!"}], 1), 400, 'input "text": a b64 value is not valid base64'),
        ({"instances": [[0.123456789] * 2] * 1000}, 413, "the body has ... bytes; the limit is 10000"),
    ],
)
def test_an_invalid_request_gets_an_error_that_says_why(server: Server, body: Any, status: int, error: str) -> None:
    response = server.predict(body)
    start, _, end = error.partition("...")
    assert response.status == status
    assert response.body["error"].startswith(start) and response.body["error"].endswith(end)


def test_paths_that_are_not_served(server: Server) -> None:
    assert server.predict({"instances": [[1, 2]]}, "/versions/7").body == {
        "error": "version 7 of toy is not served; the served version is 1"
    }
    assert server.get("/versions/7").status == 404
    assert server.get(":predict").status == 405
    assert server.get("x/metadata").status == 404


def test_endless_headers_and_requests_for_other_hosts_are_refused(server: Server) -> None:
    address = urlsplit(server.root)
    with socket.create_connection((address.hostname, address.port), timeout=60) as attacker:
        attacker.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Endless: ")
        with pytest.raises(OSError):  # the server closes the connection
            for _ in range(150):
                attacker.sendall(b"a" * (1 << 20))
        assert server.predict({"instances": [[1, 2]]}).status == 200
    request = urllib.request.Request(f"{server.root}/healthz", headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(request, timeout=60)


def test_one_bad_request_does_not_fail_others_of_its_batch(server: Server) -> None:
    def send(number: int) -> tuple[int, int]:
        value = -1 if number % 8 == 0 else number
        return number, server.predict({"instances": [[value, 0]]}).status

    with ThreadPoolExecutor(32) as clients:
        for number, status in clients.map(send, range(64)):
            assert status == (400 if number % 8 == 0 else 200)
    assert "x must not be negative" in server.predict({"instances": [[-1, 0]]}).body["error"]


def test_health_and_metrics(server: Server) -> None:
    server.predict({"instances": [[1, 2]]})
    for path in ("/healthz", "/readyz"):
        with urllib.request.urlopen(server.root + path) as response:
            assert response.status == 200
    with urllib.request.urlopen(server.root + "/metrics") as response:
        lines = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if not line.startswith("#"))
    assert float(lines['paceline_serve_requests_total{code="200"}']) >= 1
    assert lines["paceline_serve_model_version"] == "1"
    assert float(lines["paceline_serve_batch_rows_count"]) >= 1
    assert lines["paceline_serve_waiting_rows"] == "0"


def test_a_version_that_cannot_be_loaded_is_reported_and_the_previous_one_stays(server: Server, models: Path) -> None:
    (models / "broken").mkdir()
    (models / "broken").rename(models / "base" / "3")
    eventually("the error is logged", lambda: "cannot load version 3" in server.log.read_text())

    def states() -> list[tuple[str, str]]:
        return [(each["version"], each["state"]) for each in server.get().body["model_version_status"]]

    eventually("both are listed", lambda: states() == [("3", "END"), ("1", "AVAILABLE")])
    assert server.predict({"instances": [[1, 2]]}).status == 200
    (models / "base" / "3").rmdir()
    eventually("the version is removed", lambda: len(server.get().body["model_version_status"]) == 1)


def test_slow_responses_and_too_many_requests(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "1", tmp_path / "base" / "1")
    with serving(tmp_path / "base", "--most-seconds", "0.3", "--waiting", "2") as server:
        timed_out = 504, {"error": "no response within 0.3 s"}
        # The first keeps the model busy; two examples may wait for it, and do.
        assert astuple(server.predict({"signature_name": "count", "inputs": [COUNT]})) == timed_out
        assert astuple(server.predict({"instances": [[1, 2], [3, 4]]})) == timed_out
        overloaded = {"error": "2 examples are waiting; try again later"}
        assert astuple(server.predict({"instances": [[1, 2]]})) == (503, overloaded)
        eventually("it answers again", lambda: server.predict({"instances": [[1, 2]]}).status == 200, 180)


def test_a_server_that_shuts_down_answers_on_open_connections_and_closes_them(models: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(models / "1", base / "1")
    shutil.copytree(models / "2", tmp_path / "next")
    body = json.dumps({"inputs": [[1, 2]]})
    with serving(base, "--leave-after", "60") as server, contextlib.ExitStack() as stack:
        (tmp_path / "next").rename(base / "2")
        answers(server, 2)
        host, path = server.root.removeprefix("http://"), f"{urlsplit(server.address).path}:predict"
        connections = [stack.enter_context(contextlib.closing(HTTPConnection(host, timeout=60))) for _ in range(3)]
        for connection in connections:
            connection.request("POST", path, body)
            response = connection.getresponse()
            assert (response.status, response.getheader("connection")) == (200, None) and response.read()
        server.process.terminate()
        eventually("the server is not ready", lambda: ready(server) == (503, "shutting down\n"))
        for connection in connections[:2]:
            connection.request("POST", path, body)
            response = connection.getresponse()
            assert (response.status, response.getheader("connection")) == (200, "close")
            assert json.loads(response.read())["outputs"]["y"] == [[2.0, 4.0]]
        assert server.predict({"instances": [[1, 2]]}).status == 200
        assert server.process.poll() is None
        server.process.terminate()  # the second signal ends it, although a client keeps a connection open
        assert server.process.wait(60) == 0


def ready(server: Server) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(server.root + "/readyz") as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _count_responses(address: str) -> float:
    with urllib.request.urlopen(address) as response:
        lines = [
            line for line in response.read().decode().splitlines() if line.startswith("paceline_serve_requests_total")
        ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


# Saves a step whenever it is told to, and exports a model that was built before; the export of step 2 fails.
TRAINS = """
import os, shutil, sys, time
from pathlib import Path
here = Path(os.environ["STATE"])
if sys.argv[1] == "export":
    step = Path(os.environ["PACELINE_RESTORE"], "step").read_text()
    model = Path(os.environ["MODELS"], {"1": "1", "3": "2"}.get(step, "none"))
    if not model.exists():
        sys.exit("this one cannot be exported")
    shutil.copytree(model, os.environ["PACELINE_EXPORT_DIR"], dirs_exist_ok=True)
    sys.exit()
for step in (1, 2, 3):
    while not (here / f"go-{step}").exists():
        time.sleep(0.02)
    partial = Path(os.environ["PACELINE_SNAPSHOT_DIR"], "partial")
    partial.mkdir()
    (partial / "step").write_text(str(step))
    partial.rename(partial.with_name(f"step-{step}"))
while not (here / "end").exists():
    time.sleep(0.02)
"""


def test_serve_loads_newer_snapshots_of_a_run_under_load_and_no_request_fails(
    start: Starter, models: Path, state: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    fields = {"name": "steps", "code": str(tmp_path), "env": {"STATE": str(state), "MODELS": str(models)}}
    export = {"command": ["python", "train.py", "export"]}
    run = start(job(["python", "train.py", "train"], 1, **fields, export=export))
    (state / "go-1").touch()
    run.wait("committed", step=1)
    command = [sys.executable, "-m", "paceline.cli", "serve", run.folder.name, "--port", "0"]
    home = {"PACELINE_HOME": str(run.home)}
    with started(command, tmp_path / "serve.log", home) as server:
        assert server.address.endswith("/v1/models/steps")
        (state / "go-2").touch()
        eventually(
            "the failed export is logged",
            lambda: "still serving the previous one: the job's export.command ended" in server.log.read_text(),
        )
        with load(server, {"instances": [[1, 2]]}, CLIENTS, RATE, SECONDS, tmp_path) as wrk:
            eventually("requests are answered", lambda: _count_responses(server.root + "/metrics") > RATE)
            (state / "go-3").touch()
            answers(server, 3)
            failed, responses = wrk.result()
        assert failed == 0
        old, new = (f'200 {{"predictions":[{{"sum":3.0,"y":{y}}}]}}' for y in ("[1.0,2.0]", "[2.0,4.0]"))
        assert set(responses) == {old, new} and min(responses.values()) > RATE, responses
        assert 0.8 < sum(responses.values()) / (RATE * SECONDS) < 1.05, responses
        (state / "end").touch()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
    run.succeeds()


def test_a_model_that_reads_files_is_refused(models: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(models / "reads", base / "1")
    command = [sys.executable, "-m", "paceline.serve", "--base", str(base), "--name", "toy", "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert f"{base}/1 uses ReadFile: only operators for computation, variables and tables are allowed" in result.stderr


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline.serve", "--base", str(tmp_path), "--name", "toy"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert f"{tmp_path} contains no model version: a folder whose name is a number" in result.stderr
