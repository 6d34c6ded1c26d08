"""MLflow gets what a run reports: each number once, in order, whatever is away or restarted in between."""

from __future__ import annotations

import base64
import errno
import json
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import job, plan
from paceline.agent import series_files
from paceline.agent.captain_process.event_log import EventLog
from paceline.agent.deliveries import series_reader
from paceline.agent.deliveries.mlflow_delivery import MlflowDelivery, new_metrics
from paceline.agent.deliveries.mlflow_server import MlflowServer, valid_name
from paceline.agent.deliveries.schedule import Schedule
from paceline.agent.deliveries.series_reader import SeriesReader
from paceline.agent.options import Options
from paceline.frameworks.tracking import tracking_variables
from paceline.job import planning
from paceline.storage.regular_files import open_regular
from paceline.view.files.plan_files import plan_of
from support.mlflow_servers import FakeServer, fake_server

HEAD = "name: digits\nframework: torch\ncommand: [python, train.py, --rate, '0.1']\n"
ROLES = "roles: {worker: {replicas: 2}, evaluator: {}}\n"
ELASTIC = "roles: {worker: {replicas: 3, min: 1}, evaluator: {}}\n"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


def load(text: str, folder: Path, *overrides: str) -> plan.Plan:
    (folder / "train.py").touch()
    return planning.make_plan(job.load_text(HEAD + text, "job.yaml", folder, overrides).job)


class Ended(Schedule):
    """The run has ended, and there is time for a number of attempts."""

    def __init__(self, attempts: int = 3) -> None:
        super().__init__()
        self._attempts = attempts
        self.end()

    def wait_to_retry(self, attempt: int, delay: float = 0.0) -> bool:
        self._attempts -= 1
        return self._attempts > 0


class Run:
    """The files of a run, and what is delivered of them."""

    def __init__(self, folder: Path, server: FakeServer, roles: str = ROLES) -> None:
        self.folder = folder / "run"
        (self.folder / "deliveries").mkdir(parents=True)
        self.plan = load(f"{roles}track: {{mlflow: '{server.url}/'}}\n", folder)
        self.options = Options("digits-3f9a", "captain", "", str(self.folder), "", "", token="t0k3n")
        self._log = EventLog(str(self.folder), None, pytest.fail)
        self.warnings: list[str] = []
        self.announced: list[str] = []

    def write(self, kind: str, **fields: Any) -> None:
        self._log.write(kind, fields.pop("generation", 1), fields)

    def form(self, generation: int, *tasks: str) -> None:
        self.write("generation-formed", generation=generation, tasks=tasks, restore=None)

    def step(self, step: int, task: str = "worker-0", generation: int = 1, **metrics: float) -> None:
        self.write("step", generation=generation, task=task, step=step, metrics=metrics, steps_per_s=None)

    def deliver(self, attempts: int = 3, environment: dict[str, str] | None = None) -> str:
        """By a process that starts now. Returns what was not delivered."""
        assert self.plan.track is not None
        server = MlflowServer(self.plan.track.mlflow, environment or {})
        delivery = MlflowDelivery(
            self.plan, self.options, server, Ended(attempts), self.warnings.append, self.announced.append, "ada",
        )  # fmt: skip
        delivery.run()
        return delivery.undelivered()

    def forget(self) -> None:
        """As if the captain's pod had been replaced."""
        for path in self.folder.glob("deliveries/*"):
            path.unlink()


@pytest.fixture
def run(tmp_path: Path, server: FakeServer) -> Run:
    return Run(tmp_path, server)


# ---- the run of MLflow


def test_a_run_of_mlflow_has_the_parameters_and_the_end_of_the_run(run: Run, server: FakeServer) -> None:
    run.write("run-started", generation=0, run="digits-3f9a")
    run.write("generation-formed", generation=3, tasks=["worker-0"], restore=None)
    run.write("committed", step=10, snapshot="step-10-g3", bytes=1, took_s=0.1)
    best = {"snapshot": "step-5-g1", "metric": "accuracy", "value": 0.9}
    run.write("evaluated", task="evaluator-0", step=10, snapshot="step-10-g3", metrics={"accuracy": 0.8}, best=best)
    run.write("run-ended", status="failed", reason="worker-1 failed", cause="signal")
    assert run.deliver() == ""
    (server_run,) = server.runs
    assert (server.experiments, server_run["run_name"], server_run["status"]) == (["digits"], "digits-3f9a", "FAILED")
    assert server_run["params"] == {
        "framework": "torch",
        "command": "python train.py --rate 0.1",
        "roles.worker.replicas": "2",
    }
    where = f"{run.folder}/snapshots/digits-3f9a"
    assert server_run["tags"] == {
        "paceline.run": "digits-3f9a",
        "paceline.job": "digits",
        "paceline.token": "t0k3n",
        "paceline.framework": "torch",
        "paceline.generation": "3",
        "paceline.snapshot": f"{where}/step-10-g3",
        "paceline.best_snapshot": f"{where}/step-5-g1",
        "paceline.status": "failed",
        "paceline.reason": "worker-1 failed",
        "mlflow.source.name": "digits",
        "mlflow.source.type": "JOB",
        "mlflow.user": "ada",
    }
    assert server.points("evaluation/accuracy") == [(10, 0.8)]
    assert server_run["start_time"] < server_run["end_time"] + 1
    assert run.announced == ["run0"]


@pytest.mark.parametrize(("status", "expected"), [("succeeded", "FINISHED"), ("stopped", "KILLED")])
def test_each_end_has_a_status(run: Run, server: FakeServer, status: str, expected: str) -> None:
    run.write("run-ended", status=status, reason="", cause=None)
    run.deliver()
    assert server.runs[0]["status"] == expected


def test_the_run_of_mlflow_is_found_again(run: Run, server: FakeServer) -> None:
    run.deliver()
    server.requests.clear()
    run.deliver()
    assert run.announced == ["run0", "run0"] and "runs/search" not in server.requests
    run.forget()
    run.deliver()
    assert len(server.runs) == 1


def test_another_run_with_the_same_id_has_its_own(run: Run, server: FakeServer) -> None:
    run.deliver()
    run.forget()
    run.options = Options("digits-3f9a", "captain", "", str(run.folder), "", "", token="0ther")
    run.deliver()
    assert [each["tags"]["paceline.token"] for each in server.runs] == ["t0k3n", "0ther"]


def test_an_answer_that_is_lost_creates_no_second_run(run: Run, server: FakeServer) -> None:
    server.experiments = ["digits"]
    server.lost = 0

    def create(name: str, fields: dict[str, Any]) -> dict[str, Any]:
        if name == "runs/create" and not server.runs:
            server.lost = 1
        return FakeServer.answer(server, name, fields)

    server.answer = create  # type: ignore[method-assign]
    assert run.deliver() == ""
    assert len(server.runs) == 1 and server.requests.count("runs/create") == 1


def test_credentials_are_those_of_mlflow(run: Run, server: FakeServer) -> None:
    run.deliver(environment={"MLFLOW_TRACKING_TOKEN": "abc"})
    assert server.authorizations == {"Bearer abc"}
    server.authorizations.clear()
    run.deliver(environment={"MLFLOW_TRACKING_USERNAME": "ada", "MLFLOW_TRACKING_PASSWORD": "p:w"})
    assert server.authorizations == {f"Basic {base64.b64encode(b'ada:p:w').decode()}"}


# ---- numbers


def test_the_numbers_of_the_first_task_are_sent_once(run: Run, server: FakeServer) -> None:
    for step in range(1, 6):
        run.step(step, loss=1 / step)
        run.step(step, "worker-1", loss=9.0)
    run.deliver()
    run.step(6, loss=0.5, accuracy=0.1)
    run.deliver()
    assert server.points("loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25), (5, 0.2), (6, 0.5)]
    assert server.points("accuracy") == [(6, 0.1)]


def test_steps_that_are_trained_again_are_not_sent_again(run: Run, server: FakeServer) -> None:
    for step in (1, 2, 3, 2, 3, 4):
        run.step(step, loss=float(step))
    run.deliver()
    run.step(3, loss=30.0)
    run.step(5, loss=5.0)
    run.deliver()
    assert server.points("loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0)]


def test_a_captain_on_another_node_repeats_nothing(run: Run, server: FakeServer) -> None:
    run.step(1, loss=1.0)
    run.step(2, loss=2.0)
    run.deliver()
    run.forget()
    run.step(3, loss=3.0)
    run.deliver()
    assert server.points("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_server_that_is_away_loses_nothing(run: Run, server: FakeServer) -> None:
    run.step(1, loss=1.0)
    server.failures = [503] * 3
    name = f"MLflow ({server.url.removeprefix('http://')})"
    problem = "HTTP 503 Service Unavailable: as told"
    assert run.deliver() == f"the last metrics and the status were not delivered to {name}: {problem}"
    assert run.warnings == [f"cannot send to {name}: {problem}; retrying, training continues"]
    run.step(2, loss=2.0)
    assert run.deliver() == ""
    assert server.points("loss") == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500])
def test_other_failures_are_tried_again_too(run: Run, server: FakeServer, status: int) -> None:
    run.step(1, loss=1.0)
    server.failures = [status, status]
    assert run.deliver() == ""
    assert server.points("loss") == [(1, 1.0)]


def test_answers_that_are_lost_repeat_nothing(run: Run, server: FakeServer) -> None:
    run.deliver()
    for step in range(1, 4):
        run.step(step, loss=float(step))
        run.write("evaluated", task="evaluator-0", step=step, snapshot="s", metrics={})
    server.lost = 2
    assert run.deliver(attempts=10) == ""
    assert server.points("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_numbers_that_the_server_refuses_do_not_block_others(run: Run, server: FakeServer) -> None:
    run.step(1, loss=1.0)

    def refuse(name: str, fields: dict[str, Any]) -> dict[str, Any]:
        if name == "runs/get":
            server.failures = [400]
        return FakeServer.answer(server, name, fields)

    server.answer = refuse  # type: ignore[method-assign]
    assert "rejected 1 metric value" in run.deliver()
    server.answer = lambda name, fields: FakeServer.answer(server, name, fields)  # type: ignore[method-assign]
    run.step(2, loss=2.0)
    run.deliver()
    assert server.points("loss") == [(2, 2.0)]


def refuse(server: FakeServer, status: int, *refused: str) -> None:
    """Refuse requests to log these, the first of them, or to update the run."""

    def answer(name: str, fields: dict[str, Any]) -> dict[str, Any]:
        sent = {name, *(each["key"] for kind in ("tags", "metrics") for each in fields.get(kind, ()))}
        if name in ("runs/log-batch", "runs/update") and not sent.isdisjoint(refused):
            return {"status": status, "error_code": "INVALID_PARAMETER_VALUE", "message": "not that one"}
        return FakeServer.answer(server, name, fields)

    server.answer = answer  # type: ignore[method-assign]


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422])
def test_a_tag_that_the_server_refuses_is_reported_once_and_skipped(run: Run, server: FakeServer, status: int) -> None:
    refuse(server, status, "paceline.snapshot")
    for number in (1, 2):
        run.write("generation-formed", generation=number, tasks=["worker-0"], restore=None)
        run.write("committed", step=number, snapshot=f"step-{number}-g1", bytes=1, took_s=0.1)
        run.write("evaluated", task="evaluator-0", step=number, snapshot="s", metrics={"accuracy": 0.5})
    run.write("run-ended", status="succeeded", reason="", cause=None)
    name = f"MLflow ({server.url.removeprefix('http://')})"
    assert run.deliver() == f"{name} rejected 1 tag"
    (warning,) = run.warnings
    assert warning.startswith(f"{name} rejected the tag paceline.snapshot: HTTP {status}")
    assert warning.endswith(": not that one")
    (server_run,) = server.runs
    assert server_run["tags"]["paceline.generation"] == "2" and server_run["tags"]["paceline.status"] == "succeeded"
    assert server_run["status"] == "FINISHED" and server.points("evaluation/accuracy") == [(1, 0.5), (2, 0.5)]
    server.requests.clear()
    run.deliver()
    assert "runs/update" not in server.requests, "what was skipped is not sent again"


@pytest.mark.parametrize("status", [401, 403, 408, 425, 429, 500])
def test_tags_are_sent_again_after_an_error_that_may_pass(run: Run, server: FakeServer, status: int) -> None:
    refuse(server, status, "paceline.generation")
    run.write("generation-formed", generation=1, tasks=["worker-0"], restore=None)
    assert "were not delivered" in run.deliver()
    refuse(server, status)
    assert run.deliver() == "" and server.runs[0]["tags"]["paceline.generation"] == "1"


def test_a_proxy_that_does_not_find_the_server_refuses_nothing(run: Run, server: FakeServer) -> None:
    run.deliver()
    run.step(1, loss=1.0)
    server.failures = [404] * 2
    assert run.deliver() == "" and server.points("loss") == [(1, 1.0)]


def test_an_end_that_the_server_refuses_is_reported(run: Run, server: FakeServer) -> None:
    refuse(server, 400, "runs/update")
    run.write("run-ended", status="failed", reason="", cause="signal")
    assert run.deliver() == ""
    (warning,) = run.warnings
    assert "rejected the status FAILED: HTTP 400 Bad Request: not that one" in warning


def test_only_the_request_with_refused_numbers_is_skipped(run: Run, server: FakeServer) -> None:
    """A request has at most 1,000 numbers."""
    for step in range(1, 1501):
        run.step(step, **{"odd" if step == 1 else "loss": 1.0})
    refuse(server, 400, "odd")
    assert "rejected 1000 metric values" in run.deliver()
    assert [step for step, _ in server.points("loss")] == list(range(1001, 1501))


def test_parameters_that_the_server_refuses_do_not_block_numbers(run: Run, server: FakeServer) -> None:
    run.deliver()
    run.step(1, loss=1.0)
    server.failures = [400]
    assert run.deliver() == ""
    assert server.points("loss") == [(1, 1.0)]
    assert len(run.warnings) == 1 and "rejected parameters: HTTP 400 Bad Request" in run.warnings[0]


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("experiments/get-by-name", {}),
        ("experiments/get-by-name", {"experiment": None}),
        ("experiments/get-by-name", {"experiment": []}),
        ("runs/search", {"runs": [{}]}),
        ("runs/search", {"runs": {"a": 1}}),
        ("runs/search", {"runs": 1}),
        ("runs/search", {"runs": [{"info": {"run_id": "0\0"}}]}),
        ("runs/create", {"run": {"info": None}}),
        ("runs/create", {"run": {"info": {"run_id": "../a b"}}}),
        ("runs/create", {"run": {"info": {"run_id": "0" * 200_000}}}),
        ("runs/get", {"run": None}),
        ("runs/get", {"run": {"data": {"metrics": [{"key": "loss", "step": "x"}]}}}),
        ("runs/get", {"run": {"data": {"metrics": [{"key": "loss", "step": float("inf")}]}}}),
    ],
)
def test_an_answer_of_another_server_is_tried_again(
    run: Run, server: FakeServer, path: str, answer: dict[str, Any]
) -> None:
    run.step(1, loss=1.0)
    wrong = [answer]

    def answer_wrongly(name: str, fields: dict[str, Any]) -> dict[str, Any]:
        return wrong[0] if name == path and wrong else FakeServer.answer(server, name, fields)

    server.answer = answer_wrongly  # type: ignore[method-assign]
    assert run.deliver().endswith("its response is not in MLflow's format")
    wrong.clear()
    assert run.deliver() == ""
    assert server.points("loss") == [(1, 1.0)]


def test_names_are_those_that_mlflow_accepts() -> None:
    line = {"at": 1.5, "task": "worker-0", "step": 3, "metrics": {"top@5": 1.0, "train/loss": 2, "bad": None}}
    assert [(each.key, each.value, each.step, each.timestamp) for each in new_metrics([line], {})] == [
        ("top_5", 1.0, 3, 1500),
        ("train/loss", 2.0, 3, 1500),
    ]


@pytest.mark.parametrize("name", ["/loss", "a//b", "a/", "./a", "..", ".", "", "/", "a/../b", "\n", "x" * 300 + "/"])
def test_one_name_that_is_no_path_does_not_lose_all_numbers(name: str) -> None:
    """MLflow refuses the whole request: see `path_not_unique` in its mlflow/utils/validation.py."""
    key = valid_name(name)
    normal = posixpath.normpath(key)
    assert key == normal and normal != "." and not normal.startswith(("..", "/")) and len(key) <= 250


def test_many_numbers_are_sent_in_several_requests(run: Run, server: FakeServer) -> None:
    for step in range(1, 1002):
        run.step(step, a=1.0, b=2.0)
    run.deliver()
    assert len(server.runs[0]["metrics"]) == 2002
    assert server.requests.count("runs/log-batch") == 3 + 1, "and one for the parameters"


# ---- elastic runs


@pytest.fixture
def elastic(tmp_path: Path, server: FakeServer) -> Run:
    return Run(tmp_path, server, ELASTIC)


def test_without_the_first_worker_the_numbers_of_the_next_one_are_sent(elastic: Run, server: FakeServer) -> None:
    elastic.form(1, "worker-0", "worker-1", "worker-2", "evaluator-0")
    for step in (1, 2):
        elastic.step(step, "worker-1", loss=9.0)
        elastic.step(step, loss=float(step))
    elastic.form(2, "worker-1", "worker-2")
    elastic.form(2, "evaluator-0")  # it has failed, and starts again
    for step in (2, 3, 4):
        elastic.step(step, "worker-2", 2, loss=9.0)
        elastic.step(step, "worker-1", 2, loss=step / 10)
    elastic.deliver()
    expected = [(1, 1.0), (2, 2.0), (3, 0.3), (4, 0.4)]
    assert server.points("loss") == expected, "a step that is trained again keeps its first value"
    elastic.step(5, "worker-1", 2, loss=0.5)
    elastic.form(3, "worker-0", "worker-1", "worker-2")
    for step in (5, 6):
        elastic.step(step, "worker-1", 3, loss=9.0)
        elastic.step(step, generation=3, loss=float(step))
    elastic.deliver()
    assert server.points("loss") == [*expected, (5, 0.5), (6, 6.0)]


def test_another_process_knows_which_tasks_took_part(
    elastic: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events were read before, and events.jsonl has been replaced since."""
    elastic.form(1, "worker-0", "worker-1", "worker-2")
    elastic.form(2, "worker-1", "worker-2")
    assert elastic.deliver() == ""
    elastic.form(3, "worker-2")
    elastic.form(4, "worker-0", "worker-2")
    monkeypatch.setattr(elastic._log._file, "_rotate_at", 0)
    elastic.write("warning", generation=4, message="rotate")
    kept = (elastic.folder / "events.jsonl").read_text()
    assert (elastic.folder / "events.old.jsonl").exists() and kept.count("generation-formed") < 4
    for step, (generation, task) in enumerate([(1, "worker-0"), (2, "worker-1"), (3, "worker-2"), (4, "worker-0")]):
        for other in ("worker-2", "worker-1", "worker-0"):
            elastic.step(step, other, generation, loss=1.0 if other == task else 9.0)
    assert elastic.deliver() == ""
    assert server.points("loss") == [(step, 1.0) for step in range(4)]


def test_a_generation_that_is_formed_while_numbers_are_sent_is_known(elastic: Run, server: FakeServer) -> None:
    elastic.form(1, "worker-0", "worker-1", "worker-2")
    elastic.step(1, loss=1.0)

    def form_another(name: str, fields: dict[str, Any]) -> dict[str, Any]:
        if name == "runs/log-batch" and "metrics" in fields and not elastic.folder.joinpath("formed").exists():
            elastic.folder.joinpath("formed").touch()
            elastic.form(2, "worker-1", "worker-2")
            elastic.step(2, "worker-2", 2, loss=9.0)
            elastic.step(2, "worker-1", 2, loss=2.0)
        return FakeServer.answer(server, name, fields)

    server.answer = form_another  # type: ignore[method-assign]
    elastic.deliver()
    assert server.points("loss") == [(1, 1.0), (2, 2.0)]


def test_numbers_that_were_summed_up_are_sent_in_the_order_of_the_generations(elastic: Run, server: FakeServer) -> None:
    elastic.form(1, "worker-1", "worker-2")
    elastic.form(2, "worker-0", "worker-1", "worker-2")
    lines = [("worker-0", 2, 20), ("worker-1", 1, 10), ("worker-1", 2, 20), ("worker-2", 1, 10)]
    write_part(elastic.folder, 10, 0, [
        {"at": 0, "task": task, "generation": generation, "step": step, "metrics": {"loss": generation}}
        for task, generation, step in lines
    ])  # fmt: skip
    elastic.deliver()
    assert server.points("loss") == [(10, 1.0), (20, 2.0)]


def test_without_the_event_of_a_generation_the_first_task_that_reports_is_followed(
    elastic: Run, server: FakeServer
) -> None:
    """The captain's node was lost, and the next captain has adopted the tasks."""
    elastic.write("resources", host="worker-host-0", memory=1, memory_limit=2, tasks={"worker-0": {"memory": 1}})
    for step in (7, 8):
        elastic.step(step, "worker-2", loss=9.0)
        elastic.step(step, "worker-1", loss=float(step))
    elastic.deliver()
    assert server.points("loss") == [(7, 7.0), (8, 8.0)]


def test_damaged_events_are_no_generations(elastic: Run, server: FakeServer) -> None:
    for tasks in (None, 7, "worker-0", [7, None, {}], []):
        elastic.write("generation-formed", tasks=tasks, restore=None)
    elastic.form(1, "worker-1")
    elastic.step(1, loss=9.0)
    elastic.step(1, "worker-1", loss=1.0)
    elastic.deliver()
    assert server.points("loss") == [(1, 1.0)]


# ---- series


def write_part(folder: Path, tier: int, first: int, lines: list[dict[str, Any]]) -> None:
    path = folder / "series" / str(tier)
    path.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in [{"version": 1}, *lines])
    (path / f"{first}.jsonl").write_text(text)


def line(at: float, step: Any, task: str = "worker-0") -> dict[str, Any]:
    return {"at": at, "task": task, "generation": 1, "step": step, "metrics": {}}


def steps(reader: SeriesReader) -> list[Any]:
    read_steps = []
    while (read := reader.read()) is not None:
        read_steps += [each["step"] for each in read[0]]
        reader.advance(read[1])
    reader.save()
    return read_steps


def test_series_are_read_from_the_oldest_line_on_and_continued(tmp_path: Path) -> None:
    write_part(tmp_path, 300, 0, [line(0, [1, 5, 9])])
    write_part(tmp_path, 10, 300, [line(300, [10, 15, 19]), line(300, 1, "worker-1")])
    write_part(tmp_path, 1, 400, [line(400, 20), line(401, 21)])
    write_part(tmp_path, 1, 500, [line(500, 22)])
    state = str(tmp_path / "state.json")
    assert steps(SeriesReader(str(tmp_path), {"worker-0"}, state)) == [[1, 5, 9], [10, 15, 19], 20, 21, 22]
    with (tmp_path / "series" / "1" / "500.jsonl").open("a") as file:
        file.write(json.dumps(line(501, 23)) + "\n" + json.dumps(line(502, 24))[:9])
    assert steps(SeriesReader(str(tmp_path), {"worker-0"}, state)) == [23]
    assert steps(SeriesReader(str(tmp_path), {"worker-0"}, state)) == []
    write_part(tmp_path, 1, 600, [line(600, 25)])
    assert steps(SeriesReader(str(tmp_path), {"worker-0"}, state)) == [25]


def test_lines_that_were_summed_up_before_they_were_read_are_read_from_coarser_files(tmp_path: Path) -> None:
    state = str(tmp_path / "state.json")
    write_part(tmp_path, 1, 400, [line(400, 20)])
    assert steps(SeriesReader(str(tmp_path), {"worker-0"}, state)) == [20]
    (tmp_path / "series" / "1" / "400.jsonl").unlink()
    write_part(tmp_path, 10, 100, [line(100, [1, 2, 3])])
    write_part(tmp_path, 10, 380, [line(400, [20, 21, 22])])
    write_part(tmp_path, 1, 500, [line(500, 23)])
    assert steps(SeriesReader(str(tmp_path), {"worker-0"}, state)) == [[20, 21, 22], 23], "not the file before"


def test_a_long_outage_leaves_means(run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is summed up while the server is away is sent as the mean, with the last of its steps."""
    run.step(1, loss=1.0)
    run.deliver()
    monkeypatch.setattr(series_files, "PART", 2000)
    monkeypatch.setattr(series_files, "_KEPT_PARTS", {1: 1, 10: 96, 300: 256})
    for step in range(2, 101):
        run.step(step, loss=float(step))
    assert run.deliver() == ""
    sent = server.points("loss")
    assert 3 <= len(sent) < 100 and [step for step, _ in sent] == sorted({step for step, _ in sent})
    assert sent[0] == (1, 1.0) and sent[-1] == (100, 100.0)


def test_damaged_series_are_skipped(tmp_path: Path) -> None:
    write_part(tmp_path, 1, 400, [line(400, 20)])
    path = tmp_path / "series" / "1" / "400.jsonl"
    path.write_bytes(b'[]\n{"at": "x", "task": "worker-0"}\n\xff\n' + path.read_bytes())
    (tmp_path / "state.json").write_text("{}")
    assert steps(SeriesReader(str(tmp_path), {"worker-0"}, str(tmp_path / "state.json"))) == [20]


@pytest.mark.parametrize("tier", [1, 10])
def test_a_file_that_cannot_be_opened_is_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: int) -> None:
    for each, step in ((1, 20), (10, 10)):
        write_part(tmp_path, each, 400 - each, [line(400 - each, step)])

    def refuse(path: str, follow: bool) -> int:
        if f"/series/{tier}/" in path:
            raise OSError(errno.EMFILE, "Too many open files")
        return open_regular(path, follow)

    reader = SeriesReader(str(tmp_path), {"worker-0"}, str(tmp_path / "state.json"))
    with monkeypatch.context() as patched:
        patched.setattr(series_reader, "open_regular", refuse)
        assert steps(reader) == ([] if tier == 10 else [10])
    assert steps(reader) == ([10, 20] if tier == 10 else [20])


# ---- the job and the tasks


def test_parameters_are_the_fields_that_were_set_without_secrets(tmp_path: Path) -> None:
    text = (
        "env: {SEED: '7', API_KEY: '0123456789', DATA: 'http://ada:secret-word@a/'}\n"
        "restart: {hang_after: 10m}\ntrack: {mlflow: 'http://a/', experiment: other}\n"
    )
    job_plan = load(text, tmp_path, "roles.worker.replicas=3", "env.LAYERS=4")
    assert job_plan.track == plan.Track(
        "http://a/",
        "other",
        {
            "framework": "torch",
            "command": "python train.py --rate 0.1",
            "env.SEED": "7",
            "env.DATA": "http://***@a/",
            "env.LAYERS": "4",
            "roles.worker.replicas": "3",
            "restart.hang_after": "600.0",
        },
    )
    data = plan.to_data(job_plan)
    assert plan.from_data(data) == plan_of(data) == job_plan
    assert "track" not in plan.to_data(load("", tmp_path)), "plans without it look as they always have"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "track.mlflow: is missing; write mlflow: https://mlflow.example.com"),
        ("http://a/", 'track: must be a mapping, got the string "http://a/"; allowed: experiment, mlflow'),
        ("{mlflow: sqlite:///a.db}", "track.mlflow: the address must begin with https:// or http://; "),
        ("{mlflow: 'http://a:b@c/'}", "track.mlflow: the address must not contain a user name or a password; "),
        ("{mlflow: http://a/, name: b}", 'track.name: unknown key "name"; '),
    ],
)
def test_a_wrong_server(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(job.JobError) as caught:
        load(f"track: {text}\n", tmp_path)
    (mistake,) = caught.value.problems
    assert f"{mistake.what}; {mistake.remedy}".startswith(problem)


def variables(job_plan: plan.Plan, task: str, mlflow_run: str = "", **own: str) -> dict[str, str]:
    task_plan = next(each for each in job_plan.tasks if each.name == task)
    return tracking_variables(job_plan, task_plan, "digits-3f9a", mlflow_run, own)


def test_programs_that_log_themselves_continue_in_the_same_run(tmp_path: Path) -> None:
    job_plan = load(f"{ROLES}track: {{mlflow: 'http://a/'}}\n", tmp_path)
    group = {"WANDB_RUN_GROUP": "digits-3f9a"}
    first = {**group, "WANDB_RUN_ID": "digits-3f9a-worker-0", "WANDB_RESUME": "allow"}
    mlflow = {"MLFLOW_RUN_ID": "abc", "MLFLOW_TRACKING_URI": "http://a/"}
    assert variables(job_plan, "worker-0") == first
    assert variables(job_plan, "worker-0", "abc") == {**first, **mlflow}
    assert variables(job_plan, "worker-1", "abc") == {**first, "WANDB_RUN_ID": "digits-3f9a-worker-1"}
    assert variables(job_plan, "evaluator-0", "abc")["WANDB_RUN_ID"] == "digits-3f9a-evaluator-0"


def test_variables_of_the_user_take_precedence(tmp_path: Path) -> None:
    job_plan = load(f"{ROLES}track: {{mlflow: 'http://a/'}}\n", tmp_path)
    own = {"WANDB_RUN_ID": "mine", "WANDB_RUN_GROUP": "", "MLFLOW_RUN_ID": "mine"}
    assert variables(job_plan, "worker-0", "abc", **own) == {}
    assert "MLFLOW_RUN_ID" not in variables(job_plan, "worker-0", "abc", MLFLOW_TRACKING_URI="http://other")
    assert variables(job_plan, "worker-0", "abc", MLFLOW_TRACKING_URI="http://a")["MLFLOW_RUN_ID"] == "abc"
    assert variables(job_plan, "worker-0", WANDB_RESUME="must") == {
        "WANDB_RUN_GROUP": "digits-3f9a",
        "WANDB_RUN_ID": "digits-3f9a-worker-0",
    }


def test_the_leading_task_is_the_chief_if_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    text = "name: a\nframework: tensorflow\nstrategy: parameter-server\ncommand: [python, train.py]\n"
    for roles, expected in (("{worker: {}, ps: {}}", "worker-0"), ("{chief: {}, worker: {}, ps: {}}", "chief-0")):
        loaded = job.load_text(f"{text}roles: {roles}\n", "job.yaml", tmp_path)
        assert planning.make_plan(loaded.job).leading_task == expected
