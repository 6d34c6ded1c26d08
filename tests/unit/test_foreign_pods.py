"""Pods and Jobs that others have created in the namespace, with the labels of a run: they are not part of it."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from lightkube import ApiError, Client
from lightkube.core.websocket import ERROR_CHANNEL, STDERR_CHANNEL, STDOUT_CHANNEL, ExecAccumulator
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Event, Pod

from paceline.agent.run_files import replace
from paceline.backends.kubernetes.api.cluster import Cluster, Refused
from paceline.backends.kubernetes.objects import names
from paceline.backends.kubernetes.runs import listing, local_folder, running, snapshot_reader, tensorboard
from paceline.backends.kubernetes.runs.mirror import Mirror
from paceline.job import load_text, planning
from paceline.plan import Plan
from paceline.view.files import run_folders
from paceline.view.snapshots.snapshot_locations import NoClaim
from paceline.view.state import status_reader
from support import recorded

RUN, UID = "digits-3f9a", "the-captains-job"
JOB = "name: digits\nframework: none\ncommand: [python, -V]\nroles: {worker: {replicas: 2}}\nkubernetes: {image: any}\n"


def pod(uid: str, role: str, job: str, owner: str, index: str = "0", message: str = "") -> Any:
    labels = {names.RUN_LABEL: RUN, names.ROLE_LABEL: role, "batch.kubernetes.io/job-name": job}
    labels |= {"batch.kubernetes.io/job-completion-index": index}
    reference = {"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": owner, "controller": True}
    ended = {"state": {"terminated": {"exitCode": 0, "message": message}}}
    state = ended if message else {"state": {"running": {}}}
    container = {"name": role, "image": "any", "imageID": "any", "ready": True, "restartCount": 0, **state}
    return Pod.from_dict(
        {
            "metadata": {"name": uid, "uid": uid, "labels": labels, "ownerReferences": [reference] if owner else []},
            "spec": {"containers": [{"name": role, "image": "any"}]},
            "status": {"phase": "Running", "containerStatuses": [container]},
        }
    )


def job(name: str, uid: str, annotations: dict[str, str] | None = None, finished: bool = False) -> Any:
    conditions = [{"type": "Complete", "status": "True"}] if finished else []
    metadata = {"name": name, "uid": uid, "creationTimestamp": "2026-11-17T12:00:00Z", "annotations": annotations or {}}
    return Job.from_dict({"metadata": metadata, "status": {"conditions": conditions}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    replace(str(tmp_path / "run.json"), {"run": RUN, "on": "kubernetes", "uid": UID})
    return tmp_path


def plan_of(folder: Path) -> Plan:
    return planning.make_plan(load_text(JOB, "job.yaml", folder, cluster=True).job)


@pytest.fixture
def mirror(folder: Path) -> Mirror:
    mirror = Mirror(cast(Cluster, None), RUN, folder, plan_of(folder))
    mirror.update_job("ADDED", job(f"{RUN}-worker", "the-workers-job"))
    return mirror


@pytest.mark.parametrize(
    "foreign",
    [
        pod("x", "captain", RUN, ""),
        pod("x", "captain", RUN, "another-job"),
        pod("x", "captain", f"{RUN}-worker", UID),
        pod("x", "worker", f"{RUN}-worker", "another-job"),
        pod("x", "worker", f"{RUN}-worker", "the-workers-job", "abc"),
        pod("x", "worker", f"{RUN}-worker", "the-workers-job", "2"),
        pod("x", "worker", f"{RUN}-worker", "the-workers-job", "9" * 5000),
        pod("x", "worker", "others-worker", "the-workers-job"),
        pod("x", "../..", f"{RUN}-worker", "the-workers-job"),
    ],
)
def test_pods_that_no_job_of_the_run_has_created_are_ignored(mirror: Mirror, folder: Path, foreign: Any) -> None:
    own = [pod("c", "captain", RUN, UID), pod("w", "worker", f"{RUN}-worker", "the-workers-job", "1")]
    mirror.update_pods([*own, foreign])
    mirror.save_pods()
    assert {each["pod"] for each in json.loads((folder / "pods.json").read_text())["pods"]} == {"c", "w"}


def test_what_is_known_of_pods_stays_until_the_cluster_has_listed_them(mirror: Mirror, folder: Path) -> None:
    """If the cluster does not respond when a process begins to follow the run, an earlier one knows more."""
    mirror.save_pods(at_once=True)
    assert not (folder / "pods.json").exists()
    mirror.update_pods([pod("c", "captain", RUN, UID)])
    mirror.inbox.advance("c/0", "2026-11-18T00:00:00.000Z")
    mirror.save_pods(at_once=True)
    known = {name: (folder / name).read_bytes() for name in ("pods.json", "positions.json")}
    later = Mirror(cast(Cluster, SimpleNamespace(interrupt=int, close=int)), RUN, folder, plan_of(folder))
    later.update_job("ADDED", job(f"{RUN}-worker", "the-workers-job"))
    later.save_pods(at_once=True)
    later.stop()
    assert {name: (folder / name).read_bytes() for name in known} == known
    later.update_pods([])
    later.save_pods(at_once=True)
    assert json.loads((folder / "pods.json").read_text())["pods"] == [], "its pods were deleted"


def test_a_secret_of_the_run_that_somebody_deleted_is_named_as_the_runs_own(mirror: Mirror) -> None:
    waiting = pod("c", "captain", RUN, UID)
    waiting.status.containerStatuses = None
    mirror.update_pods([waiting])
    message = f'MountVolume.SetUp failed for volume "paceline-tls" : secret "{RUN}" not found'
    subject = {"kind": "Pod", "uid": "c", "name": "c"}
    fields = {"metadata": {"name": "e"}, "involvedObject": subject, "reason": "FailedMount", "message": message}
    mirror.update_events([Event.from_dict(fields)])
    [reason] = mirror.waiting
    assert str(reason).startswith(f"captain: the run's Secret {RUN} was deleted: stop the run with `paceline stop")


def refused_creation(uid: str) -> Any:
    """An event of the workers' Job: its pods violate a policy."""
    subject = {"kind": "Job", "name": f"{RUN}-worker", "uid": uid}
    message = 'Error creating: pods "x" is forbidden: violates PodSecurity "restricted:latest": hostNetwork=true'
    metadata = {"name": "e", "creationTimestamp": "2026-11-17T12:00:00Z"}
    return Event.from_dict(
        {"metadata": metadata, "involvedObject": subject, "reason": "FailedCreate", "message": message}
    )


class Admission:
    """An API server that answers dry runs like this, and creates nothing."""

    def __init__(self, *refusal: Any) -> None:
        self._refusal = refusal
        self.dry_runs = 0

    def get(self, kind: Any, name: str) -> Any:
        template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "worker"}]}}
        metadata = {"name": name, "uid": "the-workers-job"}
        return Job.from_dict({"metadata": metadata, "spec": {"template": template}})

    def create(self, created: Any, dry_run: bool = False) -> Any:
        assert dry_run and isinstance(created, Pod)
        self.dry_runs += 1
        for code, reason, message in self._refusal:
            body = {"code": code, "reason": reason, "message": message}
            raise ApiError(response=httpx2.Response(code, json=body))
        return created


VIOLATION = (403, "Forbidden", 'pods "x" is forbidden: violates PodSecurity "restricted:latest": hostNetwork=true')


@pytest.mark.parametrize(
    ("admission", "uid", "ends"),
    [
        (Admission(), "the-workers-job", False),
        (Admission((403, "Forbidden", 'cannot create resource "pods"')), "the-workers-job", False),
        (Admission((500, "InternalError", "etcd is away")), "the-workers-job", False),
        (Admission(VIOLATION), "another-job", False),
        (Admission(VIOLATION), "the-workers-job", True),
    ],
    ids=["admitted", "not permitted", "unknown", "another Job", "refused"],
)
def test_an_event_alone_does_not_end_a_run(folder: Path, admission: Admission, uid: str, ends: bool) -> None:
    """Anybody who may create events may have written it: the cluster is asked whether it refuses such pods."""
    plan = planning.make_plan(load_text(JOB, "job.yaml", folder, cluster=True).job)
    mirror = Mirror(Cluster(cast(Client, admission), "shared", "team", "https://127.0.0.1:1"), RUN, folder, plan)
    mirror.is_followed = True
    mirror.update_job("ADDED", job(f"{RUN}-worker", "the-workers-job"))
    for _ in range(3):
        mirror.update_events([refused_creation(uid)])
    assert (mirror.fatal_reason is not None) == ends
    assert [reason.cause for reason in mirror.waiting] == (["admission"] if uid == "the-workers-job" else [])
    assert admission.dry_runs <= 1


def test_a_pod_of_another_user_does_not_answer_for_a_pod_that_reads_a_claim(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = (pod("x", "visit", "visit-1", "another-job"), pod("c", "visit", "visit-1", "the-visit"))
    cluster = Cluster(cast(Client, Pods(*pods)), "shared", "team", "https://127.0.0.1:1")
    monkeypatch.setattr(snapshot_reader, "connect_for", lambda *_: cluster)
    replace(str(folder / "run.json"), {**run_folders.info(folder), "context": None, "namespace": None})
    reader = snapshot_reader.SnapshotPod(folder, print)
    reader._visit, reader._visit_uid = "visit-1", "the-visit"
    assert [each.metadata.name for each in reader._pods_of_visit()] == ["c"]


def test_an_event_alone_does_not_say_that_a_claim_was_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`delete` would conclude that the snapshots are gone."""
    text = JOB + "snapshots: {to: claim://disk/runs}\n"
    plan = planning.make_plan(load_text(text, "job.yaml", folder, cluster=True).job)
    events = [
        {"reason": "FailedMount", "message": 'persistentvolumeclaim "disk" not found'},
        {"reason": "FailedCreate", "message": VIOLATION[2]},
    ]
    claims: list[Any] = [SimpleNamespace()]

    class Claims:
        def list(self, kind: Any, fields: Any) -> list[Any]:
            return [SimpleNamespace(to_dict=lambda: events[0])]

        def get(self, kind: Any, name: str) -> Any:
            if not claims:
                raise ApiError(response=httpx2.Response(404, json={"code": 404, "reason": "NotFound", "message": "no"}))
            return claims[0]

    cluster = Cluster(cast(Client, Claims()), "shared", "team", "https://127.0.0.1:1")
    monkeypatch.setattr(snapshot_reader, "connect_for", lambda *_: cluster)
    replace(str(folder / "run.json"), {**run_folders.info(folder), "context": None, "namespace": None})
    reader = snapshot_reader.SnapshotPod(folder, print)
    assert "there is no PersistentVolumeClaim disk" in reader._why([], plan, True)
    claims.clear()
    with pytest.raises(NoClaim):
        reader._why([], plan, True)
    del events[0]
    assert "violates PodSecurity" in reader._why([], plan, True)


@pytest.mark.parametrize(
    "fields",
    [
        {"started": None}, {"problems": [1]}, {"run": {"a": 1}}, {"run": "vic\n../../x"}, {"restarts": 7},
        {"steps": "many"}, {"reason": ["x"]}, {"ended": "soon"}, {"folder": "/"},
    ],
)  # fmt: skip
def test_only_valid_fields_of_a_termination_message_are_used(fields: dict[str, Any]) -> None:
    message = json.dumps({"status": "failed", "reason": "no", **fields})
    report = running.captain_report([pod("c", "captain", RUN, UID, message=message)])
    assert report == {"status": "failed", **({} if "reason" in fields else {"reason": "no"}), **_valid(fields)}


def _valid(fields: dict[str, Any]) -> dict[str, Any]:
    return {"started": None} if fields == {"started": None} else {}


@pytest.mark.parametrize("message", ['{"status": "owned"}', '{"status": ["x"]}', "[1]", "{", '"succeeded"'])
def test_a_termination_message_that_is_no_report_is_ignored(message: str) -> None:
    assert running.captain_report([pod("c", "captain", RUN, UID, message=message)]) is None


def test_a_listing_takes_the_id_and_the_start_from_the_job_and_the_rest_from_its_own_pod() -> None:
    class Client:
        def list(self, kind: Any, labels: Any) -> list[Any]:
            lie = json.dumps({"status": "failed", "run": "other\nline", "started": None, "problems": [1]})
            foreign = pod("x", "captain", RUN, "another-job", message=json.dumps({"status": "stopped"}))
            own = pod("c", "captain", RUN, UID, message=lie)
            return [job(RUN, UID, finished=True)] if kind is Job else [foreign, own]

    class OneCluster:
        client = Client()

        def request(self, _: str, do: Any) -> Any:
            return do()

    [report] = listing.list_runs(cast(Cluster, OneCluster()))
    assert (report["run"], report["status"], report["started"][:10]) == (RUN, "failed", "2026-11-17")
    assert "problems" not in report


def test_a_job_of_another_submission_with_the_same_id_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """This user's submission was interrupted before the uid of its Job was known."""
    replace(str(tmp_path / "run.json"), {"run": RUN, "on": "kubernetes", "submission": "mine"})
    own, other = (job(RUN, "uid", {names.SUBMISSION: text}) for text in ("mine", "theirs"))
    assert not local_folder._is_replaced(tmp_path, own)
    assert local_folder._is_replaced(tmp_path, other) and local_folder._is_replaced(tmp_path, job(RUN, "uid"))
    local_folder.save_job_uid(tmp_path, "uid")
    assert not local_folder._is_replaced(tmp_path, other)
    assert local_folder._is_replaced(tmp_path, job(RUN, "a later one", {names.SUBMISSION: "mine"}))


class Pods:
    """The API server of a namespace with these pods. The captain of another user accepts every request."""

    def __init__(self, *pods: Any) -> None:
        self._pods = pods
        self.asked: list[str] = []

    def list(self, kind: Any, labels: dict[str, str], **_: Any) -> list[Any]:
        of_kind = self._pods if kind is Pod else ()
        return [each for each in of_kind if labels.items() <= each.metadata.labels.items()]

    def exec(self, name: str, **_: Any) -> Any:
        self.asked.append(name)
        return SimpleNamespace(exit_code=0)


def labelled(uid: str, owner: str, message: str = "") -> Any:
    """A pod with all labels of the captain's."""
    each = pod(uid, "captain", RUN, owner, message=message)
    each.metadata.labels["batch.kubernetes.io/controller-uid"] = UID
    return each


def running_with(mirror: Mirror, folder: Path, *pods: Any) -> tuple[running.Running, Pods]:
    client = Pods(*pods)
    cluster = Cluster(cast(Client, client), "shared", "team", "https://127.0.0.1:1")
    return running.Running(cluster, RUN, folder, mirror), client


def test_the_end_of_a_run_is_not_taken_from_a_pod_that_its_job_has_not_created(mirror: Mirror, folder: Path) -> None:
    lie = json.dumps({"status": "succeeded", "reason": ""})
    truth = json.dumps({"status": "failed", "reason": "no"})
    run, _ = running_with(mirror, folder, labelled("x", "another-job", lie), labelled("c", UID))
    assert run.is_undecided()
    run, _ = running_with(mirror, folder, labelled("x", "", lie), labelled("c", UID, truth))
    run.write_report()
    assert json.loads((folder / "report.json").read_text())["status"] == "failed"


def test_a_run_that_was_killed_has_not_restarted(mirror: Mirror, folder: Path) -> None:
    """Its captain may outlive other hosts for a moment, and announce a restart."""
    with (folder / "events.jsonl").open("a") as events:
        events.write("".join(json.dumps(each) + "\n" for each in (recorded.STARTED, recorded.KILLED, recorded.RESTART)))
    (folder / running.STOP_REASON).write_text("killed immediately")
    run, _ = running_with(mirror, folder, labelled("c", UID))
    run.write_report()
    report = json.loads((folder / "report.json").read_text())
    assert (report["status"], report["restarts"]) == ("stopped", [])


def test_only_the_captain_of_the_run_is_asked_to_stop(mirror: Mirror, folder: Path) -> None:
    """A pod of another user could accept the request, and the run would continue."""
    run, client = running_with(mirror, folder, labelled("x", "another-job"), labelled("c", UID))
    assert run.stop("why") and client.asked == ["c"]


def test_snapshots_are_read_only_from_the_captain_of_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pods = (labelled("x", "another-job"), labelled("c", UID))
    cluster = Cluster(cast(Client, Pods(*pods)), "shared", "team", "https://127.0.0.1:1")
    monkeypatch.setattr(snapshot_reader, "connect_for", lambda *_: cluster)
    (folder / RUN).mkdir()
    replace(str(folder / RUN / "run.json"), {**run_folders.info(folder), "context": None, "namespace": None})
    assert snapshot_reader.SnapshotPod(folder / RUN, print)._captain() == "c"


def test_the_output_of_a_task_is_never_an_event(mirror: Mirror, folder: Path) -> None:
    """Whatever a program prints, even around its agent: only lines of the captain's pod, which runs no task, are."""
    (folder / "logs").mkdir()
    end = json.dumps({"at": "2026-11-17T12:00:00.000Z", "event": "run-ended", "status": "succeeded", "generation": 1})
    reader = mirror.inbox.reader(captain=False)
    for line in (end, f"worker-0 2026-11-17T12:00:00.000Z g1 | {end}", f"../events {end}", f"events.jsonl {end}"):
        reader.take(line)
    assert not (folder / "events.jsonl").exists()
    assert status_reader.read(run_folders.Run(RUN, folder)).state.ended is None


def test_the_output_of_a_captain_that_is_asked_to_stop_is_not_kept(
    mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its image may be of another user, and write until the request times out."""
    peaks: list[int] = []

    def execute(name: str, stdout: Any = False, stderr: Any = False, **_: Any) -> Any:
        received = ExecAccumulator(stdout=stdout, stderr=stderr, raise_on_error=False, decode="utf-8")
        tracemalloc.start()
        for _ in range(32):
            received.feed(STDOUT_CHANNEL, bytes(1024 * 1024))
            received.feed(STDERR_CHANNEL, bytes(1024 * 1024))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        return received.feed(ERROR_CHANNEL, b'{"kind": "Status", "status": "Success"}')

    run, client = running_with(mirror, folder, labelled("c", UID))
    monkeypatch.setattr(client, "exec", execute)
    assert run.stop("why")
    assert len(peaks) == 1 and peaks[0] < 8 * 1024 * 1024


# ---- TensorBoard


def board_pod(name: str, owner: str, uid: str) -> Any:
    labels = {names.RUN_LABEL: RUN, names.ROLE_LABEL: "tensorboard"}
    reference = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": owner, "uid": uid, "controller": True}
    metadata = {"name": name, "labels": labels, "ownerReferences": [reference] if owner else []}
    return Pod.from_dict({"metadata": metadata, "status": {"phase": "Running"}})


def owned(uid: str, owner: str) -> Any:
    owners = [SimpleNamespace(uid=owner, controller=True)]
    return SimpleNamespace(metadata=SimpleNamespace(uid=uid, ownerReferences=owners))


@pytest.mark.parametrize("owner", [("", ""), ("theirs", "2"), ("own", "other"), ("none", "1")])
def test_a_pod_of_another_user_is_not_shown_as_tensorboard(owner: tuple[str, str]) -> None:
    class Boards(Pods):
        def get(self, kind: Any, name: str) -> Any:
            objects = {
                f"{RUN}-tensorboard": owned("board", "captain"),
                "own": owned("1", "board"),
                "theirs": owned("2", "another"),
            }
            if name not in objects:
                status = {"code": 404, "reason": "NotFound", "message": "not found"}
                raise ApiError(response=httpx2.Response(404, json=status))
            return objects[name]

    def cluster_of(*pods: Any) -> Cluster:
        return Cluster(cast(Client, Boards(*pods)), "shared", "team", "https://127.0.0.1:1")

    assert tensorboard.pod(cluster_of(board_pod("x", *owner), board_pod("c", "own", "1")), RUN) == "c"
    with pytest.raises(Refused, match="no pod of"):
        tensorboard.pod(cluster_of(board_pod("x", *owner)), RUN)
