"""The model server, as its clients see it: a real process with a real SavedModel behind TensorFlow Serving's paths."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
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

RATE, SECONDS, CLIENTS = 300, 30, 16  # requests a second, for so long, by so many connections
COUNT = 1_000_000  # takes the model seconds


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
    asked = {"signature_name": "repeat", "inputs": {"text": ["a", {"b64": "/w=="}], "n": 2}}
    got = server.predict(asked).body
    assert got == {"outputs": {"text": ["aa", {"b64": "//8="}], "raw_bytes": [{"b64": "YQ=="}, {"b64": "/w=="}]}}


def test_status_and_metadata_are_those_of_tensorflow_serving(server: Server) -> None:
    fine = {"error_code": "OK", "error_message": ""}
    status = {"model_version_status": [{"version": "1", "state": "AVAILABLE", "status": fine}]}
    assert server.get().body == status
    assert server.get("/versions/1").body == status
    told = server.get("/metadata").body
    assert told["model_spec"] == {"name": "toy", "signature_name": "", "version": "1"}
    known = told["metadata"]["signature_def"]["signature_def"]
    assert sorted(known) == ["count", "repeat", "serving_default"]
    assert known["serving_default"]["method_name"] == "tensorflow/serving/predict"
    taken = known["serving_default"]["inputs"]["x"]
    assert taken["dtype"] == "DT_FLOAT"
    assert taken["tensor_shape"] == {
        "dim": [{"size": "-1", "name": ""}, {"size": "2", "name": ""}],
        "unknown_rank": False,
    }


X = 'input "x": '
FLOATS = X + "the model takes float32 [-1, 2], got "
N = 'input "n": '
KNOWN = 'known are "instances", "inputs" and "signature_name"'


def repeat(text: Any, n: Any) -> dict[str, Any]:
    return {"signature_name": "repeat", "inputs": {"text": text, "n": n}}


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (b"{", 400, "the body is no JSON: unexpected end of data: line 1 column 2 (char 1)"),
        (b"[1]", 400, 'the body must be an object with "instances" or "inputs"'),
        ({}, 400, 'the body must have one of "instances" and "inputs"'),
        ({"instances": [], "inputs": []}, 400, 'the body must have one of "instances" and "inputs"'),
        ({"instances": []}, 400, '"instances" must be a list of at least one example'),
        ({"instances": [[1, 2], [3]]}, 400, X + "its lists are not of equal length"),
        ({"instances": [[1, 2, 3]]}, 400, FLOATS + "[1, 3]"),
        ({"instances": [["a", "b"]]}, 400, FLOATS + "text"),
        ({"instances": [[None, 1]]}, 400, FLOATS + "values of several kinds or null"),
        ({"instances": [{"z": 1}]}, 400, 'instance 0 lacks "x"'),
        ({"instances": [{"x": [1, 2], "z": 1}]}, 400, 'instance 0 has "z"; the model takes "x"'),
        ({"instances": [[1, 2]], "signature": "a"}, 400, f'the body has "signature"; {KNOWN}'),
        (
            {"signature_name": "a", "inputs": 1},
            400,
            'the model has no signature "a"; it has count, repeat, serving_default',
        ),
        (repeat(["a"], 1.5), 400, N + "the model takes int32 [], got numbers with a fraction"),
        (repeat(["a"], 3_000_000_000), 400, N + "int32 holds -2147483648 to 2147483647"),
        (repeat([{"b64": "!"}], 1), 400, 'input "text": a b64 is not base64'),
        ({"instances": [[0.123456789] * 2] * 1000}, 413, "the body has ... bytes; 10000 are allowed"),
    ],
)
def test_a_request_that_cannot_be_answered_says_why(server: Server, body: Any, status: int, why: str) -> None:
    got = server.predict(body)
    before, _, behind = why.partition("...")
    assert got.status == status
    assert got.body["error"].startswith(before) and got.body["error"].endswith(behind)


def test_paths_that_are_not_served(server: Server) -> None:
    assert server.predict({"instances": [[1, 2]]}, "/versions/7").body == {
        "error": "version 7 of toy is not served; 1 is"
    }
    assert server.get("/versions/7").status == 404
    assert server.get(":predict").status == 405
    assert server.get("x/metadata").status == 404


def test_one_bad_request_does_not_fail_those_it_went_with(server: Server) -> None:
    def ask(number: int) -> tuple[int, int]:
        value = -1 if number % 8 == 0 else number
        return number, server.predict({"instances": [[value, 0]]}).status

    with ThreadPoolExecutor(32) as clients:
        for number, status in clients.map(ask, range(64)):
            assert status == (400 if number % 8 == 0 else 200)
    assert "x must not be negative" in server.predict({"instances": [[-1, 0]]}).body["error"]


def test_health_and_metrics(server: Server) -> None:
    server.predict({"instances": [[1, 2]]})
    for path in ("/healthz", "/readyz"):
        with urllib.request.urlopen(server.root + path) as got:
            assert got.status == 200
    with urllib.request.urlopen(server.root + "/metrics") as got:
        lines = dict(line.rsplit(" ", 1) for line in got.read().decode().splitlines() if not line.startswith("#"))
    assert float(lines['paceline_serve_requests_total{code="200"}']) >= 1
    assert lines["paceline_serve_model_version"] == "1"
    assert float(lines["paceline_serve_batch_rows_count"]) >= 1
    assert lines["paceline_serve_waiting_rows"] == "0"


def test_a_version_that_cannot_be_loaded_is_told_and_the_one_before_goes_on(server: Server, models: Path) -> None:
    (models / "broken").mkdir()
    (models / "broken").rename(models / "base" / "3")
    eventually("it is told", lambda: "version 3 cannot be loaded" in server.log.read_text())
    told = [(each["version"], each["state"]) for each in server.get().body["model_version_status"]]
    assert told == [("3", "END"), ("1", "AVAILABLE")]
    assert server.predict({"instances": [[1, 2]]}).status == 200
    (models / "base" / "3").rmdir()
    eventually("it is forgotten", lambda: len(server.get().body["model_version_status"]) == 1)


def test_answers_that_take_too_long_and_requests_that_are_too_many(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "1", tmp_path / "base" / "1")
    with serving(tmp_path / "base", "--most-seconds", "0.3", "--waiting", "2") as server:
        late = 504, {"error": "no answer within 0.3 s"}
        # The first keeps the model busy; two examples may wait for it, and do.
        assert astuple(server.predict({"signature_name": "count", "inputs": [COUNT]})) == late
        assert astuple(server.predict({"instances": [[1, 2], [3, 4]]})) == late
        many = {"error": "2 examples are waiting: try again later"}
        assert astuple(server.predict({"instances": [[1, 2]]})) == (503, many)
        eventually("it answers again", lambda: server.predict({"instances": [[1, 2]]}).status == 200)


def test_a_server_that_has_to_go_answers_by_kept_connections_and_closes_them(models: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(models / "1", base / "1")
    shutil.copytree(models / "2", tmp_path / "next")
    body = json.dumps({"inputs": [[1, 2]]})
    with serving(base, "--leave-after", "60") as server, contextlib.ExitStack() as kept:
        (tmp_path / "next").rename(base / "2")
        answers(server, 2)
        host, path = server.root.removeprefix("http://"), f"{urlsplit(server.address).path}:predict"
        lines = [kept.enter_context(contextlib.closing(HTTPConnection(host, timeout=60))) for _ in range(3)]
        for line in lines:
            line.request("POST", path, body)
            got = line.getresponse()
            assert (got.status, got.getheader("connection")) == (200, None) and got.read()
        server.process.terminate()
        eventually("it is not ready for more", lambda: ready(server) == (503, "going\n"))
        for line in lines[:2]:
            line.request("POST", path, body)
            got = line.getresponse()
            assert (got.status, got.getheader("connection")) == (200, "close")
            assert json.loads(got.read())["outputs"]["y"] == [[2.0, 4.0]]
        assert server.predict({"instances": [[1, 2]]}).status == 200
        assert server.process.poll() is None
        server.process.terminate()  # once more: now, though a client keeps a connection
        assert server.process.wait(30) == 0


def ready(server: Server) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(server.root + "/readyz") as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _answered(address: str) -> float:
    with urllib.request.urlopen(address) as got:
        lines = [line for line in got.read().decode().splitlines() if line.startswith("paceline_serve_requests_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


# Saves a step whenever it is told to, and exports a model that was made before: of the second it cannot.
TRAINS = """
import os, shutil, sys, time
from pathlib import Path
here = Path(os.environ["STATE"])
if sys.argv[1] == "export":
    step = Path(os.environ["PACELINE_RESTORE"], "step").read_text()
    made = Path(os.environ["MODELS"], {"1": "1", "3": "2"}.get(step, "none"))
    if not made.exists():
        sys.exit("this one cannot be exported")
    shutil.copytree(made, os.environ["PACELINE_EXPORT_DIR"], dirs_exist_ok=True)
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


def test_serve_takes_newer_snapshots_of_a_run_over_under_load_and_no_request_fails(
    start: Starter, models: Path, state: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    fields = {"name": "steps", "code": str(tmp_path), "env": {"STATE": str(state), "MODELS": str(models)}}
    export = {"command": ["python", "train.py", "export"]}
    run = start(job(["python", "train.py", "train"], 1, **fields, export=export))
    (state / "go-1").touch()
    run.wait("committed", step=1)
    words = [sys.executable, "-m", "paceline.cli", "serve", run.folder.name, "--port", "0"]
    home = {"PACELINE_HOME": str(run.home)}
    with started(words, tmp_path / "serve.log", home) as server:
        assert server.address.endswith("/v1/models/steps")
        (state / "go-2").touch()
        eventually("it is told", lambda: "no newer model: the job's export ended" in server.log.read_text())
        with load(server, {"instances": [[1, 2]]}, CLIENTS, RATE, SECONDS, tmp_path) as wrk:
            eventually("requests are answered", lambda: _answered(server.root + "/metrics") > RATE)
            (state / "go-3").touch()
            answers(server, 3)
            failed, seen = wrk.result()
        assert failed == 0
        old, new = (f'200 {{"predictions":[{{"sum":3.0,"y":{y}}}]}}' for y in ("[1.0,2.0]", "[2.0,4.0]"))
        assert set(seen) == {old, new} and min(seen.values()) > RATE, seen
        assert 0.8 < sum(seen.values()) / (RATE * SECONDS) < 1.05, seen
        (state / "end").touch()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
    run.succeeds()


def test_a_model_that_reads_files_is_refused(models: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(models / "reads", base / "1")
    command = [sys.executable, "-m", "paceline.serve", "--base", str(base), "--name", "toy", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{base}/1 uses ReadFile: operators that compute, and those of variables and tables, are let" in done.stderr


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline.serve", "--base", str(tmp_path), "--name", "toy"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{tmp_path} holds no version: a folder with a number as name" in done.stderr
