"""`paceline page` as a process: who gets in, what it shows of runs, live updates, large runs, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support import person, recorded, runs
from support.page_server import LIMIT_S, EventSource, PageServer, many_lines, many_tasks, memory, page_server
from support.runs import Starter, eventually

LINES = 1_000_000
TASKS = 1_000
HOSTILE = '</script><img src=x onerror=alert(1)>\x1b]0;title\x07 "\\'


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    log = f"{recorded.at(1)} g1 | {HOSTILE}\n"
    folder = recorded.write(home, "digits-3f9a", report=recorded.REPORT, logs={"worker-0": log})
    (folder / "job.yaml").write_text("name: digits\nenv: {WANDB_API_KEY: 0123456789abcdef}\n")
    plan = {**json.loads((folder / "plan.json").read_text()), "roles": [{"env": {"WANDB_API_KEY": "0123456789abcdef"}}]}
    (folder / "plan.json").write_text(json.dumps(plan))
    many_lines(many_tasks(home, TASKS) / "logs" / "worker-0.log", LINES)
    return home


@pytest.fixture(scope="module")
def server(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """In a folder to which others can write."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "json.py").write_text("raise SystemExit('a module of the working folder')")
    with page_server(home, cwd=folder) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: PageServer) -> Iterator[httpx2.Client]:
    with server.client() as client:
        yield client


def ask(client: httpx2.Client, path: str, status: int = 200, **parameters: Any) -> Any:
    response = client.get(path, params=parameters)
    assert response.status_code == status and response.headers["content-type"] == "application/json", response.text
    return response.json()


# ---- who gets in


def test_only_the_printed_address_opens_the_page(server: PageServer, client: httpx2.Client) -> None:
    with server.client(sign_in=False) as stranger:
        assert stranger.get("/").status_code == 401 and "paceline page" in stranger.get("/").text
        assert stranger.get(server.address).status_code == 401, "the token works once"
        for path in ("index.html", "api/runs", "api/runs/stream", "api/runs/digits-3f9a", "nothing"):
            assert stranger.get(path).status_code == 401
        assert stranger.post("api/sign-in", data={"password": ""}).status_code == 401
    page = client.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "unsafe" not in page.headers["content-security-policy"]


def test_without_a_session_a_connection_gets_one_answer(server: PageServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as stranger:
        stranger.sendall(2 * b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"".join(iter(lambda: stranger.recv(65536), b"")).count(b"HTTP/1.1 401") == 1


def test_other_names_and_other_pages_are_refused(client: httpx2.Client, server: PageServer) -> None:
    assert client.get("api/runs", headers={"host": f"evil.example:{server.port}"}).status_code == 421
    assert client.get("api/runs", headers={"host": f"localhost:{server.port}", "origin": ""}).status_code == 403
    assert client.get("api/runs/stream", headers={"origin": "http://evil.example"}).status_code == 403
    stacks = "api/runs/digits-3f9a/stacks"
    assert client.post(stacks, headers={"origin": "http://127.0.0.1:1"}).status_code == 403
    assert client.post(stacks, json={"tasks": 1}).json()["error"]["kind"] == "UsageError"
    assert client.post(stacks, content="{}", headers={"content-type": "text/plain"}).status_code == 415
    assert client.post(stacks, content="x" * 70_000).status_code == 413
    assert client.delete("api/runs/digits-3f9a").status_code == 405


def test_files_of_the_page_and_no_others(client: httpx2.Client) -> None:
    page = client.get("index.html")
    assert client.get("index.html", headers={"if-none-match": page.headers["etag"]}).status_code == 304
    for path in ("%2e%2e/app.py", "..%2fapp.py", "static/../app.py", ".hidden", "app.py", "/etc/passwd", "index.html/"):
        assert client.get(path).status_code == 404


def test_runs_that_do_not_exist(client: httpx2.Client) -> None:
    for key in ("x", "%2e%2e", "digits", "digits-3f9a@0123456789", "a" * 300, "-", "%00"):
        for path in ("", "/logs?task=worker-0", "/job", "/stream"):
            response = client.get(f"api/runs/{key}{path}")
            assert response.status_code == 404 and response.json()["error"]["what"], key


def test_below_a_path_behind_a_proxy(tmp_path: Path) -> None:
    with page_server(tmp_path, "--base-path", "/user/ann", "--allow-host", "hub.example.com") as server:
        assert server.url.endswith("/user/ann/")
        with server.client() as client:
            assert client.get("api/runs").json()["runs"] == [] and client.get("").status_code == 200
            assert client.get(f"{server.origin}/api/runs").status_code == 401
            names = {"host": "hub.example.com", "origin": "https://hub.example.com"}
            assert client.post("api/contexts", json={"context": "x"}, headers=names).status_code == 404


def test_with_a_password_and_tls_for_other_machines(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("correct horse\nmore\n")
    (tmp_path / "password").chmod(0o600)
    options = ("--host", "0.0.0.0", "--password-file", str(tmp_path / "password"))
    with page_server(tmp_path, *options) as server:
        assert "token" not in server.address and server.address.startswith("https://")
        [printed] = [line for line in server.said().splitlines() if "SHA-256" in line]
        pem = ssl.get_server_certificate(("127.0.0.1", server.port))
        (tmp_path / "page.pem").write_text(pem)
        import hashlib

        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest().upper()
        assert printed.rpartition(" ")[2].replace(":", "") == digest
        trusting = ssl.create_default_context(cafile=str(tmp_path / "page.pem"))
        url = f"https://localhost:{server.port}/"
        headers = {"origin": url[:-1], "host": f"127.0.0.1:{server.port}"}
        with httpx2.Client(verify=trusting, headers=headers, timeout=LIMIT_S) as client:
            own = {"origin": f"https://127.0.0.1:{server.port}"}
            assert 'type="password"' in client.get(url, headers={"origin": own["origin"]}).text
            for _ in range(5):
                assert client.post(f"{url}api/sign-in", data={"password": "wrong"}, headers=own).status_code == 401
            limited = client.post(f"{url}api/sign-in", data={"password": "correct horse"}, headers=own)
            assert limited.status_code == 429
        with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"HTTP/1.1 200" not in plain.recv(1000)


def test_the_password_opens_the_page(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("correct horse\n")
    with page_server(tmp_path, "--password-file", str(tmp_path / "password")) as server:
        assert "chmod 600" in server.said()
        with server.client(sign_in=False) as client:
            signed_in = client.post("api/sign-in", data={"password": "correct horse"})
            assert (signed_in.status_code, signed_in.headers["location"]) == (303, "../")
            assert client.get("api/runs").status_code == 200


def refused(tmp_path: Path, *options: str) -> str:
    """What the command says before it ends with an error."""
    result = recorded.call(tmp_path, "page", *options)
    assert result.returncode in (1, 2) and result.stdout == ""
    return result.stderr


def test_options_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("abc\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}: another process listens on this port" in refused(tmp_path, "--port", str(port))
    assert "--password-file" in refused(tmp_path, "--port", "0", "--host", "0.0.0.0")
    assert "too short" in refused(tmp_path, "--port", "0", "--password-file", str(tmp_path / "short"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe a password")
    assert "is not text" in refused(tmp_path, "--port", "0", "--password-file", str(tmp_path / "binary"))
    assert "use --certificate and --key together" in refused(tmp_path, "--certificate", "x.pem")
    assert "invalid path" in refused(tmp_path, "--base-path", "/a/../b")
    assert "cannot use this certificate" in refused(tmp_path, "--port", "0", "--certificate", "/x", "--key", "/y")


def test_over_ssh_the_command_of_the_tunnel_is_printed(tmp_path: Path) -> None:
    with page_server(tmp_path, env={"SSH_CONNECTION": "10.0.0.1 5000 10.0.0.7 22"}) as server:
        assert f"ssh -N -L {server.port}:127.0.0.1:{server.port} " in server.said() and "@10.0.0.7" in server.said()


def test_in_a_terminal_enter_prints_another_address_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    env = {**person.environment(tmp_path), "KUBECONFIG": str(tmp_path / "none")}
    terminal = person.Terminal(person.words_of("page", "--port", "0"), tmp_path, env, columns=200)
    try:
        terminal.wait_for("token=[^ ]+\r\n")
        terminal.type("\r")
        terminal.wait_for("(?s)token=[^ ]+\r\n.*token=[^ ]+\r\n")
        first, second = re.findall(r"http://[^ \r]+", terminal.raw)
        assert first != second
        assert [httpx2.get(each, timeout=LIMIT_S).status_code for each in (first, second, second)] == [401, 303, 401]
        terminal.type("\x03")
        assert terminal.end() == 0 and "Traceback" not in terminal.raw and "Fatal" not in terminal.raw
    finally:
        terminal.process.kill()


def test_in_a_terminal_it_asks_for_the_password(tmp_path: Path) -> None:
    env = {**person.environment(tmp_path), "KUBECONFIG": str(tmp_path / "none")}
    terminal = person.Terminal(person.words_of("page", "--port", "0", "--host", "0.0.0.0"), tmp_path, env)
    try:
        terminal.wait_for("Password for this page: ")
        terminal.type("correct horse\r")
        terminal.wait_for("Again: ")
        terminal.type("correct horse\r")
        terminal.wait_for("https://[^ ]+/\r\n")
        assert "token" not in terminal.raw and "correct" not in terminal.raw
        terminal.type("\x03")
        assert terminal.end() == 0
    finally:
        terminal.process.kill()


# ---- what it shows


def test_all_runs_and_one_run(client: httpx2.Client) -> None:
    listed = ask(client, "api/runs")
    items = {item["key"]: item for item in listed["runs"]}
    assert set(items) == {"digits-3f9a", "large-1000"} and items["digits-3f9a"]["causes"] == {"signal": 1}
    assert listed["sources"][0]["source"] == "local" and len(listed["sources"]) == 1
    assert ask(client, "api/about")["home"] and ask(client, "api/contexts") == {"contexts": []}
    status = ask(client, "api/runs/digits-3f9a")
    assert (status["status"], status["steps"], status["is_live"]) == ("succeeded", 161, False)
    [restart] = ask(client, "api/runs/digits-3f9a/restarts")["restarts"]
    assert restart["cause"] == "signal" and restart["restore"] == "step-100"
    events = ask(client, "api/runs/digits-3f9a/events", kind="restart")
    assert [each["event"] for each in events["events"]] == ["restart"] and events["next"] is None
    assert ask(client, "api/runs/digits-3f9a/hosts")["hosts"][0]["host"]
    series = ask(client, "api/runs/digits-3f9a/series")
    assert {each["name"]: each["kind"] for each in series["series"]} == {"accuracy": "evaluation"}
    assert "an older version of Paceline has started it" in series["note"], "it has steps, but no series"
    [line] = ask(client, "api/runs/digits-3f9a/series", name="accuracy")["lines"]
    assert line["task"] == "evaluator-0" and line["points"][0][1:4] == [100, 2, 0.9]
    table = client.get("api/runs/digits-3f9a/series.csv", params={"name": "accuracy"})
    assert table.headers["content-type"].startswith("text/csv") and "accuracy,evaluator-0,2," in table.text
    assert ask(client, "api/runs/digits-3f9a/goodput")["wall_s"] > 0
    assert ask(client, "api/runs/digits-3f9a/report")["tasks"]


def test_secrets_of_a_job_are_not_shown(client: httpx2.Client) -> None:
    job, plan = (client.get(f"api/runs/digits-3f9a/{name}") for name in ("job", "plan"))
    assert "WANDB_API_KEY: ***" in job.json()["text"] and "0123456789" not in job.text + plan.text
    assert plan.json()["plan"]["roles"] == [{"env": {"WANDB_API_KEY": "***"}}]


def test_a_log_that_cannot_be_read_is_no_bug(client: httpx2.Client, home: Path) -> None:
    logs = recorded.write(home, "broken-3f9a", report=recorded.REPORT).joinpath("logs")
    logs.mkdir(exist_ok=True)
    logs.joinpath("worker-0.log").symlink_to("worker-0.log")
    error = ask(client, "api/runs/broken-3f9a/logs", 502, task="worker-0")["error"]
    assert error["what"] == "cannot read a file of the run: Too many levels of symbolic links"
    shutil.rmtree(logs.parent)


def test_a_search_imports_nothing_from_the_working_folder(client: httpx2.Client) -> None:
    window = ask(client, "api/runs/digits-3f9a/logs", task="worker-0", grep="onerror")
    assert len(window["lines"]) == 1


def test_hostile_output_is_only_ever_json(client: httpx2.Client) -> None:
    path = "api/runs/digits-3f9a/logs"
    several: list[dict[str, Any]] = [
        {"task": "*", **each} for each in ({}, {"find": "onerror"}, {"grep": "onerror=.*1"})
    ]
    for parameters in (
        {},
        {"find": "onerror"},
        {"grep": "onerror=.*1"},
        {"position": 0},
        {"at": recorded.at(0)},
        *several,
    ):
        response = client.get(path, params={"task": "worker-0", **parameters})
        assert response.headers["content-type"] == "application/json" and "<" not in response.text
        [line] = response.json()["lines"]
        assert line["text"] == HOSTILE.replace("\x1b", "\\x1b").replace("\x07", "\\x07")
    error = client.get("api/runs/<script>")
    assert error.headers["content-type"] == "application/json" and "<" not in error.text
    assert client.head("api/runs/digits-3f9a/stream").status_code == 200
    events = EventSource(client, "api/runs/digits-3f9a/logs/stream?task=worker-0&position=0")
    assert "onerror" in events.wait("lines")["lines"][0]["text"] and events.wait("end") == {}


def test_windows_that_do_not_exist(client: httpx2.Client) -> None:
    other_tasks: list[dict[str, Any]] = [{}, {"task": "../plan"}, {"task": "worker-7"}]
    wrong: list[dict[str, Any]] = [
        {"limit": 0}, {"limit": "x"}, {"position": -1}, {"direction": "up"}, {"at": "now"}, {"grep": "("},
        {"find": "a", "grep": "b"}, {"find": "a" * 2000}, {"full": 2},
    ]  # fmt: skip
    for parameters in [*other_tasks, *({"task": "worker-0", **each} for each in wrong)]:
        response = client.get("api/runs/digits-3f9a/logs", params=parameters)
        assert response.status_code in (400, 404) and response.json()["error"]["what"], parameters


def test_an_expression_that_never_ends_is_killed(client: httpx2.Client, server: PageServer, home: Path) -> None:
    log = home / "runs" / "digits-3f9a" / "logs" / "evaluator-0.log"
    log.write_text(f"{recorded.at(1)} g1 | {'a' * 60}!\n")
    response = client.get("api/runs/digits-3f9a/logs", params={"task": "evaluator-0", "grep": "(a+)+$"})
    assert (response.status_code, response.json()["error"]["kind"]) == (504, "TimeLimit")
    eventually("its process has ended", lambda: not runs.children(server.process.pid))


def test_a_log_of_a_million_lines_is_shown_and_searched_in_pieces(client: httpx2.Client, server: PageServer) -> None:
    path, before = "api/runs/large-1000/logs", memory(server.process.pid)
    tail = ask(client, path, task="worker-0", limit=3)
    assert [line["text"] for line in tail["lines"]] == [f"line {LINES - 3 + n} of {LINES}" for n in range(3)]
    middle = ask(client, path, task="worker-0", position=tail["end"] // 2, limit=2000)
    numbers = [int(line["text"].split()[1]) for line in middle["lines"]]
    assert numbers == list(range(numbers[0], numbers[0] + 2000)) and abs(numbers[0] - LINES / 2) < LINES / 20
    previous = ask(client, path, task="worker-0", position=middle["begin"], direction="backward", limit=10)
    assert int(previous["lines"][-1]["text"].split()[1]) == numbers[0] - 1
    at = ask(client, path, task="worker-0", at=middle["lines"][7]["at"], direction="forward", limit=1)
    assert at["lines"][0]["at"] == middle["lines"][7]["at"]
    for search in ({"find": "LINE 987654 "}, {"grep": r"line 98765[4] "}):
        position, pieces = 0, 0
        while True:
            pieces += 1
            window = ask(client, path, task="worker-0", direction="forward", position=position, limit=1, **search)
            if window["lines"] or window["is_complete"]:
                break
            position = window["scanned"]
        assert window["lines"][0]["text"] == f"line 987654 of {LINES}", f"after {pieces} pieces"
    assert memory(server.process.pid) - before < 100 << 20


def test_a_run_of_a_thousand_tasks(client: httpx2.Client, server: PageServer) -> None:
    timeline = ask(client, "api/runs/large-1000/timeline", first=990, tasks=20)
    assert (
        timeline["total_tasks"] == TASKS and [each["task"] for each in timeline["tasks"]][-1] == f"worker-{TASKS - 1}"
    )
    kinds = [segment[0] for segment in timeline["tasks"][0]["segments"]]
    assert kinds == ["queued", "waiting", "starting", "training", "restarting", "restarting", "training"]
    assert len(ask(client, "api/runs/large-1000/tasks")["tasks"]) == TASKS
    events = EventSource(client, "api/runs/large-1000/stream")
    assert len(events.wait("tasks")["tasks"]) == TASKS and events.wait("end") == {}
    assert len(client.get("api/runs/large-1000").content) < 100_000


# ---- live


def test_a_killed_worker_is_seen_live(start: Starter, state: Path) -> None:
    run = start(runs.job(runs.orders("none", state, "--steps", "100000"), workers=2))
    run.all_step()
    with page_server(run.home) as server, server.client() as client:
        name = run.folder.name
        listed, events = (
            EventSource(client, "api/runs/stream"),
            EventSource(client, f"api/runs/{name}/stream?series=step"),
        )
        [item] = listed.wait("runs")["runs"]
        assert item["key"] == name and item["is_live"]
        assert {row["task"] for row in events.wait("tasks", lambda data: data["full"])["tasks"]} == {
            "worker-0",
            "worker-1",
        }
        lines = EventSource(client, f"api/runs/{name}/logs/stream?task=worker-1")
        both = EventSource(client, f"api/runs/{name}/logs/stream?task=*&position=0")
        pid = run.task("worker-1")
        os.kill(pid, signal.SIGKILL)
        new = events.wait("events", lambda data: any(each["event"] == "restart" for each in data["events"]))
        [restart] = [each for each in new["events"] if each["event"] == "restart"]
        assert restart["data"]["cause"] == "signal" and "SIGKILL" in restart["text"]

        def started_again(data: Any) -> list[Any]:
            """Its row, once it runs again: the other task may run earlier."""
            rows = [row for row in data["tasks"] if row["task"] == "worker-1"]
            return [row for row in rows if row["generation"] == 2 and row["pid"]]

        change = events.wait("tasks", started_again)
        assert not change["full"] and [row["pid"] for row in started_again(change)] != [pid]
        assert events.wait("points", lambda data: data["points"][-1]["generation"] == 2)
        listed.wait("change", lambda data: data["runs"] and data["runs"][0]["causes"] == {"signal": 1})
        assert lines.wait("lines")["lines"]
        for task in ("worker-0", "worker-1"):
            both.wait(
                "lines",
                lambda data, task=task: any((line["task"], line["generation"]) == (task, 2) for line in data["lines"]),
            )
        [detail] = ask(client, f"api/runs/{name}/restarts")["restarts"]
        assert detail["exit"] == "SIGKILL" and detail["log"]["task"] == "worker-1"
        stacks = client.post(f"api/runs/{name}/stacks", json={"tasks": ["worker-0"]}).json()
        assert stacks["tasks"][0]["pid"] == run.task("worker-0") and "orders.py" in stacks["text"]
        run.call("stop", name, "--now")
        events.wait("status", lambda data: data["status"] == "stopped" and not data["is_live"])
        assert events.wait("end") == {}
        listed.wait("change", lambda data: data["runs"] and data["runs"][0]["status"] == "stopped")
    run.end()


def test_ctrl_c_ends_it_at_once_although_pages_are_open(home: Path) -> None:
    server = PageServer(home)
    try:
        with server.client() as client:
            streams = [EventSource(client, f"api/runs{path}/stream") for path in ("", "", "")]
            for each in streams:
                each.wait("runs")
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(LIMIT_S) == 0
            assert server.said() == "press Ctrl-C to quit\n"
    finally:
        server.stop()


def test_nothing_is_read_while_nobody_looks(tmp_path: Path) -> None:
    """Files of a run that was looked at are closed after a while, and its thread has ended."""
    folder = recorded.write(tmp_path, report=recorded.REPORT)
    with page_server(tmp_path) as server, server.client() as client:

        def threads() -> int:
            return len(list(Path(f"/proc/{server.process.pid}/task").iterdir()))

        maps = Path(f"/proc/{server.process.pid}/maps")
        eventually("what the first views need is imported", lambda: "pydantic_core" in maps.read_text())
        assert ask(client, f"api/runs/{folder.name}")["status"] == "succeeded"
        eventually("the thread of an ended run to end", lambda: threads() <= 2)
