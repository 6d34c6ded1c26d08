"""The Python API: jobs, and runs whose folders are written by hand. Its results equal those of `-o json`."""

from __future__ import annotations

import dataclasses
import doctest
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import client
from paceline import plan as plans
from paceline.agent.net import messages
from paceline.agent.profile_messages import FOLDER, ProfileTaken
from paceline.agent.stack_messages import Frame, StacksTaken, ThreadSamples
from paceline.backends.kubernetes.api.cluster import connect
from paceline.backends.kubernetes.runs import local_folder
from paceline.backends.local import detached_start
from paceline.client import api_reference
from paceline.client.diagnosis import stacks
from paceline.client.notebooks import html, live_table
from paceline.client.snapshots import run_store
from paceline.job import load as load_job
from paceline.job import overrides, planning
from paceline.storage.stores.bucket import BucketStore
from paceline.storage.stores.folder import FolderStore
from paceline.view.files.run_folders import Run
from paceline.view.text import option_names
from support import committed, recorded
from support.recorded import LIFE, REPORT, at, call
from support.worlds import make_plan

RUN = "digits-3f9a"
LOGS = {"worker-0": f"{at(1)} g1 | hello\n{at(3)} g2 | again\n", "worker-1": f"{at(2)} g1 | other\n"}
JOB = "name: digits\nframework: none\ncommand: [python, train.py]\nroles:\n  worker: {replicas: 2}\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = recorded.write(tmp_path, RUN, report=REPORT, logs=LOGS)
    committed.life(FolderStore(str(folder / "snapshots")), tmp_path / "scratch")
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def printed(home: Path, *arguments: str) -> Any:
    return json.loads(call(home, *arguments, "-o", "json").stdout)


def printed_lines(home: Path, *arguments: str) -> list[Any]:
    return [json.loads(line) for line in call(home, *arguments, "-o", "json").stdout.splitlines()]


# ---- jobs


def test_a_job_is_loaded_with_changes(home: Path) -> None:
    changes = {"roles.worker.replicas": 4, "env.SEED": "7", "limits.runtime": "6h", "restart": {"limit": 3}}
    plan = client.plan(client.load("job.yaml", set=changes))
    assert plan.tasks == ("worker-0", "worker-1", "worker-2", "worker-3")
    fields = plan.to_dict()
    assert (fields["limits"]["runtime"], fields["restart"]["limit"]) == (21600.0, 3)
    assert fields["roles"][0]["env"] == {"SEED": "7"}


def test_a_string_in_set_is_not_parsed(home: Path) -> None:
    with pytest.raises(client.JobError, match=r'set: roles\.worker\.replicas="4".*got the string "4"'):
        client.load(home / "job.yaml", set={"roles.worker.replicas": "4"})
    with pytest.raises(client.UsageError, match="set: a field has a value that a job file cannot have"):
        client.load(home / "job.yaml", set={"env": object()})


def test_a_job_of_fields_is_that_of_the_file(home: Path) -> None:
    job = client.Job(
        name="digits", framework="none", command=["python", Path("train.py")], roles={"worker": {"replicas": 2}}
    )
    assert client.plan(job) == client.plan(client.load("job.yaml"))
    assert (job.name, job.notes, repr(job)) == ("digits", (), "<Job digits>")


def test_a_job_of_fields_has_the_errors_of_a_file_without_lines(home: Path) -> None:
    with pytest.raises(client.JobError) as mistake:
        client.Job(name="digits", framework="torchh", command=["python", "train.py"])
    problem = mistake.value.problems[0]
    (home / "bad.yaml").write_text("name: digits\nframework: torchh\ncommand: [python, train.py]\n")
    with pytest.raises(client.JobError) as in_file:
        client.load("bad.yaml")
    expected = in_file.value.problems[0]
    assert (problem.what, problem.remedy) == (expected.what, expected.remedy)
    assert (problem.file, problem.line, problem.snippet) == ("Job(...)", None, None)
    assert isinstance(mistake.value, client.PacelineError)


def test_programs_of_an_image_need_not_exist_here(home: Path) -> None:
    fields: dict[str, Any] = {"name": "digits", "framework": "none", "command": ["no-such-program"]}
    with pytest.raises(client.JobError, match="no-such-program"):
        client.Job(**fields)
    job = client.Job(**fields, kubernetes={"image": "example.com/image:1"})
    assert client.render(job, run="digits-1").objects[0]["kind"] == "Job"
    with pytest.raises(client.JobError, match="no-such-program"):
        client.submit(job)
    assert not list((home / "runs").glob("digits-[!3]*"))


def test_jobs_plans_and_objects_equal_those_of_the_command_line(home: Path) -> None:
    text = JOB + "kubernetes: {image: example.com/image:1}\n"
    (home / "job.yaml").write_text(text)
    job = client.load("job.yaml")
    assert job.to_dict() == printed(home, "validate")
    assert client.plan(job).to_dict() == printed(home, "plan")
    assert str(client.plan(job)) == call(home, "plan").stdout
    rendered = client.render(job, run="digits-1")
    assert rendered.to_dict() == printed(home, "render", "--run", "digits-1")
    assert str(rendered) == call(home, "render", "--run", "digits-1").stdout


# ---- runs


def test_what_is_read_of_a_run_equals_the_command_line(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = client.get("digits")
    results = [
        (run.status().to_dict(), printed(home, "status")),
        (run.to_dict(), printed(home, "status")),
        ([each.to_dict() for each in run.events()], printed_lines(home, "events")),
        ([each.to_dict() for each in run.logs()], printed_lines(home, "logs")),
        ([each.to_dict() for each in run.snapshots()], printed(home, "snapshots", "ls")),
        (
            [each.to_dict() for each in run.snapshots(include_superseded=True)],
            printed(home, "snapshots", "ls", "--all"),
        ),
        (client.runs().to_dict(), printed(home, "ls")),
    ]
    for result, expected in results:
        assert result == expected
        assert all(each["schema_version"] == 1 for each in (result if isinstance(result, list) else [result]))
        assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert capfd.readouterr() == ("", "")


def test_parts_of_results_have_the_form_of_the_command_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, name = client.get(RUN), f"{FOLDER}/worker-0.xplane.pb"
    plan = dataclasses.replace(make_plan(1), framework="torch")
    (run.folder / "plan.json").write_text(plans.to_json(plan))
    frames = (Frame("train.py", 3, "step"), Frame("train.py", 9, "<module>"))
    taken = StacksTaken("", 1, "worker-0", "", 7, frames, ((0, 1),), (ThreadSamples(7, (0, 0), 1.0),), True)
    monkeypatch.setattr(stacks, "ask", lambda *_: [messages.member_message(taken)])
    profile = ProfileTaken("", 1, "worker-0", "", 5, {name: 4})
    monkeypatch.setattr("paceline.client.diagnosis.profile.ask", lambda *_: [messages.member_message(profile)])
    forms: list[tuple[Any, list[Any], dict[str, Any]]] = [
        (run.stacks(), list(run.stacks().processes), printed(home, "stacks")),
        (run.profile(steps=5), list(run.profile(steps=5).tasks), printed(home, "profile", "--steps", "5")),
        (run.status(), list(run.status().tasks), printed(home, "status")),
    ]
    for whole, parts, expected in forms:
        assert whole.to_dict() == expected and expected["schema_version"] == 1
        assert parts and [part.to_dict() for part in parts] == [
            {"schema_version": 1, **each} for each in expected["tasks"]
        ]
    thread = run.stacks("worker-0").processes[0].threads[0]
    assert thread.to_dict() == {"schema_version": 1, **forms[0][2]["tasks"][0]["threads"][0]}
    assert run.profile("worker", to=home / "to", timeout=1).folder == home / "to"
    with pytest.raises(client.JobError) as mistake:
        client.Job(name="digits", framework="torchh", command=["python", "train.py"])
    assert mistake.value.problems[0].to_dict() == {"schema_version": 1, **mistake.value.fields()["problems"][0]}


def test_the_fields_of_a_status(home: Path) -> None:
    status = client.get(RUN).status()
    assert (status.run, status.status, status.steps, status.generations) == (RUN, "succeeded", 161, 2)
    assert status.succeeded and not status.is_running
    worker = status.tasks[0]
    assert (worker.name, worker.step, worker.exit, worker.metrics["loss"]) == ("worker-0", 161, "exit 0", 0.2)


def test_events_and_lines_are_selected(home: Path) -> None:
    run = client.get(RUN)
    assert [event.kind for event in run.events()] == [event["event"] for event in LIFE]
    assert [str(line) for line in run.logs(task="worker-0")] == ["hello", "again"]
    assert [str(line) for line in run.logs(task=["worker-1"])] == ["other"]
    assert [str(line) for line in run.logs(grep="^o|^h", tail=1)] == ["other"]
    assert [line.at for line in run.logs(generation=2)] == [at(3)]
    with pytest.raises(client.UsageError, match="has no task 'worker-7'"):
        list(run.logs(task="worker-7"))


def test_a_series_comes_from_the_events_if_there_is_nothing_else(home: Path) -> None:
    points = client.get(RUN).series("loss", task="worker-0")
    assert [point.value for point in points] == [0.8, 0.3123, 0.3, 0.2]
    assert points[0].to_dict()["schema_version"] == 1
    assert client.get(RUN).series("nothing") == []


def test_a_snapshot_is_listed_and_copied(home: Path) -> None:
    run = client.get(RUN)
    newest = run.snapshots()[0]
    assert (newest.name, newest.step, newest.is_current) == ("step-40-g2", 40, True)
    assert Path(newest.address).is_dir()
    assert (run.copy_snapshot(home / "copy") / "step").read_text() == "40"
    assert (run.copy_snapshot(home / "older", "step-10-g1") / "step").read_text() == "10"


def test_time_limits_are_typed(home: Path) -> None:
    folder = recorded.write(home, "slow-1", events=LIFE[:8])
    run = client.get("slow-1")
    waits: list[Callable[[], object]] = [
        lambda: run.wait(timeout=0.01),
        lambda: list(run.events(follow=True, timeout=0.01)),
        lambda: list(run.logs(follow=True, timeout=0.01)),
    ]
    with recorded.supervised(folder):
        for wait in waits:
            with pytest.raises(client.WaitTimeout, match="slow-1 has not ended within 0 s") as limit:
                wait()
            assert isinstance(limit.value, TimeoutError) and isinstance(limit.value, client.PacelineError)
        with pytest.raises(client.UsageError, match="timeout=-1"):
            run.wait(timeout=-1)
    with pytest.raises(client.EndedBefore):
        client.get(RUN).wait(until="step=1000")


def test_a_run_that_is_just_created_is_followed_until_it_starts(home: Path) -> None:
    folder = recorded.write(home, "new-1", events=[])
    (folder / "events.jsonl").unlink()
    with pytest.raises(client.WaitTimeout):
        list(client.get("new-1").events(follow=True, timeout=0.01))
    os.utime(folder, (0, 0))  # long ago
    assert list(client.get("new-1").events(follow=True, timeout=10)) == []


def test_runs_are_found_and_missing_ones_are_errors(home: Path) -> None:
    assert [run.id for run in client.runs()] == [RUN]
    assert client.get().id == client.get("dig").id == RUN
    assert client.runs()[:1].to_dict() == client.runs().to_dict()
    with pytest.raises(client.NoRun, match="no run 'none'"):
        client.get("none")
    with pytest.raises(client.UsageError, match="use one of local, kubernetes"):
        client.runs(on="moon")


def test_deleting_refuses_a_running_run(home: Path) -> None:
    folder = recorded.write(home, "slow-1", events=LIFE[:8])
    run = client.get("slow-1")
    with recorded.supervised(folder), pytest.raises(client.NotDeleted, match="slow-1 is still running"):
        run.delete()
    assert run.delete().to_dict()["schema_version"] == 1 and not folder.exists()
    with pytest.raises(client.PacelineError, match="slow-1 was deleted"):
        run.status()


def test_errors_name_what_their_reader_uses(home: Path) -> None:
    """The same error names arguments in Python, and options on the command line."""
    wrong: list[tuple[Callable[[], object], list[str], str, str]] = [
        (lambda: client.get("x"), ["status", "x"], "`client.runs()` lists all; on='kubernetes' searches a cluster",
         "`paceline ls` lists all; --on kubernetes searches a cluster"),
        (lambda: client.runs(namespace="a"), ["ls", "-n", "a"], "namespace='a': is only for runs on a cluster; use on=",
         "--namespace 'a': is only for runs on a cluster; use --on kubernetes"),
        (lambda: client.get(on="kubernetes"), ["status", "--on", "kubernetes"], "`client.runs(on='kubernetes')` lists",
         "`paceline ls --on kubernetes` lists the runs"),
        (lambda: list(client.get(RUN).logs(since="ten")), ["logs", "--since", "ten"], "since='ten': invalid time",
         "--since 'ten': invalid time"),
        (lambda: client.get(RUN).wait(until="end"), ["wait", "--for", "end"], "until='end': invalid", "--for 'end':"),
        (lambda: client.get(RUN).stacks(), ["stacks"], f"see: client.get('{RUN}').status()",
         f"see: paceline status {RUN}"),
        (lambda: client.submit(client.load("job.yaml"), rebuild_data=True), ["run", "--ingest"],
         "rebuild_data=True: the job has no `ingest`", "--ingest: the job has no `ingest`"),
    ]  # fmt: skip
    for use, arguments, in_python, in_options in wrong:
        with pytest.raises(client.PacelineError) as error:
            use()
        assert in_python in str(error.value)
        shown = call(home, *arguments)
        assert in_options in shown.stderr and "client." not in shown.stderr, shown.stderr
        option_names.reword(error.value)
        assert f"error: {error.value}\n" == shown.stderr


def test_an_error_has_the_form_of_the_command_line(home: Path) -> None:
    with pytest.raises(client.NoRun) as error:
        client.get("none")
    form = {"kind": "NoRun", "what": "no run 'none'", "where": "", "remedy": error.value.remedy}
    assert error.value.to_dict() == {"schema_version": 1, "error": form}
    option_names.reword(error.value)
    assert error.value.to_dict() == printed(home, "status", "none")
    (home / "bad.yaml").write_text("name: digits\nframework: torchh\ncommand: [python, train.py]\n")
    with pytest.raises(client.JobError) as mistake:
        client.load("bad.yaml")
    assert mistake.value.to_dict() == printed(home, "plan", "bad.yaml")


# ---- notebooks


def test_html_is_escaped(home: Path) -> None:
    evil = "<script>alert(1)</script>"
    step = recorded.event(4, "step", task=f"worker-0{evil}", step=60, metrics={evil: 0.8}, steps_per_s=None)
    report = {**REPORT, "status": "failed", "reason": f"ValueError: {evil}\x1b[31m"}
    recorded.write(home, "evil-1", events=[*LIFE, step], report=report)
    for text in (client.get("evil-1")._repr_html_(), client.runs()._repr_html_()):
        assert "<script" not in text and "&lt;script&gt;" in text and "\x1b" not in text
    assert client.get("evil-1").status()._repr_html_() == client.get("evil-1")._repr_html_()


def test_html_of_many_rows_is_limited() -> None:
    report = {**REPORT, "run": RUN}
    text = html.of_list([report] * (html.MOST_ROWS + 5))
    assert text.count("<tr>") == html.MOST_ROWS + 1 and "and 5 more" in text
    assert html.of_list([]) == "<div></div>"


class Handle:
    """What IPython's display() returns: what is shown can be replaced."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, table: Any) -> None:
        self.shown.append(table.data)


def test_watch_updates_its_table_until_the_run_ends(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recorded.write(home, "slow-1", events=LIFE[:8])
    handle = Handle()

    def display(table: Any, display_id: bool) -> Handle:
        assert display_id
        handle.update(table)
        return handle

    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            (folder / "report.json").write_text(json.dumps({**REPORT, "run": "slow-1"}))
            (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in LIFE))

    monkeypatch.setattr(live_table, "_in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(live_table, "time", SimpleNamespace(sleep=pause))
    with recorded.supervised(folder):
        client.get("slow-1").watch()
    assert pauses == [live_table.INTERVAL_S] * 3
    assert "running" in handle.shown[0] and "succeeded" not in handle.shown[0]
    assert "succeeded" in handle.shown[-1]
    assert len(handle.shown) == len(set(handle.shown)), "a table that has not changed is not sent again"


def test_watch_ends_at_its_time_limit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recorded.write(home, "slow-1", events=LIFE[:8])
    handle = Handle()
    monkeypatch.setattr(live_table, "_in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: handle)
    with recorded.supervised(folder), pytest.raises(client.WaitTimeout, match="slow-1 has not ended within 0 s"):
        client.get("slow-1").watch(timeout=0.01)


def test_watch_needs_a_notebook(home: Path) -> None:
    with pytest.raises(client.UsageError, match="needs a notebook"):
        client.get(RUN).watch()


def test_fields_are_only_for_functions(home: Path) -> None:
    with pytest.raises(client.UsageError, match="workers: only for a function"):
        client.submit(client.load("job.yaml"), workers=2)
    assert [run.id for run in client.runs()] == [RUN]


# ---- credentials


def test_runs_with_different_stores_do_not_mix_credentials(home: Path) -> None:
    runs = []
    for number in range(4):
        folder = recorded.write(home, f"bucket-{number}", report=REPORT)
        env = {"AWS_ACCESS_KEY_ID": f"key-{number}", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": f"eu-{number}"}
        plan = {"tasks": [], "snapshots": {"to": f"s3://bucket-{number}/a"}, "roles": [{"decides": True, "env": env}]}
        (folder / "plan.json").write_text(json.dumps(plan))
        runs.append(Run(f"bucket-{number}", folder))

    def opened(run: Run) -> tuple[str, str, str]:
        store = run_store.open_run(run).reader._store  # type: ignore[attr-defined]
        assert isinstance(store, BucketStore)
        return run.name, store._url, store._store.config["access_key_id"]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(opened, runs * 2))
    assert results == [(f"bucket-{number}", f"s3://bucket-{number}/a", f"key-{number}") for number in range(4)] * 2


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: shared
clusters: [{{name: a, cluster: {{server: "https://127.0.0.1:{port}"}}}}]
users: [{{name: me, user: {{token: "token-{port}"}}}}]
contexts: [{{name: shared, context: {{cluster: a, user: me, namespace: team}}}}]
"""


def test_runs_on_different_clusters_do_not_mix_credentials(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planning.make_plan(load_job(home / "job.yaml").job)
    folders = {}
    for port in (1, 2):  # two clusters with the same name of a context
        (home / f"config-{port}").write_text(KUBECONFIG.format(port=port))
        monkeypatch.setenv("KUBECONFIG", str(home / f"config-{port}"))
        folders[port] = local_folder.make_folder(plan, "", connect(), f"there-{port}")
    for port, folder in folders.items():
        cluster = local_folder.reopen(folder).cluster
        assert cluster.access is not None
        token = cluster.access.credentials.current().authorization
        assert (cluster.server, token) == (f"https://127.0.0.1:{port}", f"Bearer token-{port}")


def test_the_page_matches_the_docstrings() -> None:
    page = Path(__file__).parents[2] / "docs" / "python-api.md"
    assert page.read_text() == api_reference.page(), "run: python -m paceline.client.api_reference > docs/python-api.md"
    listed = {*api_reference.FUNCTIONS, *api_reference.CLASSES, *api_reference.ERRORS}
    assert listed == set(client.__all__) <= set(dir(client))


def test_the_page_says_what_everything_means() -> None:
    page = api_reference.page()
    assert re.findall(r"^\| `(\w+)` \|.*\|  \|$", page, re.MULTILINE) == [], "attributes without a text"
    assert re.findall(r"^#+ `([\w.]+)`\n\n```python\n[^`]+```\n\s*(?:#|\Z)", page, re.MULTILINE) == [], "methods"


def test_the_examples_of_docstrings() -> None:
    for module in (detached_start, overrides, option_names):
        assert doctest.testmod(module).failed == 0
