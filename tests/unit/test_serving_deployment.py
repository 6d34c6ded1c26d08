"""Serving objects are applied, watched and deleted, with an API server that stores objects and runs nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from paceline.backends.kubernetes.api import volume_claims
from paceline.backends.kubernetes.api.cluster import Cluster, Unreachable, connect
from paceline.backends.kubernetes.payload import prepare
from paceline.backends.kubernetes.serving import deployment, unready_reasons
from paceline.cli import serve_on_kubernetes as serving
from paceline.client.models import job_programs, kubernetes_serving
from paceline.errors import PacelineError
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stored_run_files import StoredRunFiles
from paceline.storage.stores.folder import FolderStore
from paceline.view.files import run_folders
from paceline.view.snapshots.snapshot_locations import Source
from support import committed, recorded
from support.recorded import call
from support.served import HEAD, JOBS, RUN, rendered

Object = dict[str, Any]
OWNED = ("Service", "NetworkPolicy", "ConfigMap")
PATHS = {
    "Deployment": "/apis/apps/v1/namespaces/team-a/deployments/",
    "Service": "/api/v1/namespaces/team-a/services/",
    "PersistentVolumeClaim": "/api/v1/namespaces/team-a/persistentvolumeclaims/",
    "Pod": "/api/v1/namespaces/team-a/pods/",
}


class Api:
    """Objects by path. Deleting a Deployment also deletes what it owns, as on a cluster."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.requests: list[tuple[str, str]] = []
        self.count = 0
        self.stuck = False  # no pod becomes ready

    def apply(self, path: str, manifest: Object) -> Object:
        before = self.objects.get(path)
        self.count += before is None
        metadata = (
            before["metadata"]
            if before
            else {"uid": f"uid-{self.count}", "creationTimestamp": "2026-11-16T00:00:00Z", "generation": 0}
        )
        metadata["generation"] += 1
        server_fields = {name: metadata[name] for name in ("uid", "creationTimestamp", "generation")}
        stored = {**manifest, "metadata": {**manifest["metadata"], **server_fields}}
        if manifest["kind"] == "Deployment":
            counts = dict.fromkeys(("replicas", "updatedReplicas", "availableReplicas"), manifest["spec"]["replicas"])
            stored["status"] = {"observedGeneration": server_fields["generation"], **({} if self.stuck else counts)}
        self.objects[path] = stored
        return stored

    def delete(self, path: str) -> None:
        uid = self.objects.pop(path)["metadata"]["uid"]
        for other, each in list(self.objects.items()):
            if uid in [owner["uid"] for owner in each["metadata"].get("ownerReferences", [])]:
                del self.objects[other]

    def below(self, path: str) -> list[Object]:
        return [each for name, each in self.objects.items() if name.rpartition("/")[0] == path]

    def names(self, kind: str) -> set[str]:
        return {each["metadata"]["name"] for each in self.objects.values() if each["kind"] == kind}


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def cluster(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, data: Object, status: int = 200) -> None:
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def reply(self) -> None:
            path, length = unquote(urlsplit(self.path).path), int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            api.requests.append((self.command, path.rpartition("/")[2]))
            if self.command == "PATCH":
                assert self.headers["Content-Type"] == "application/apply-patch+yaml"
                self.answer(api.apply(path, json.loads(body)))
            elif path.endswith(("/configmaps", "/pods", "/events")):
                query = parse_qs(urlsplit(self.path).query)
                labels = [each.split("=") for each in query.get("labelSelector", [""])[0].split(",") if each]
                items = [
                    each
                    for each in api.below(path)
                    if all(each["metadata"].get("labels", {}).get(name) == value for name, value in labels)
                ]
                self.answer({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items})
            elif path not in api.objects:
                status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
                self.answer({**status, "message": f"{path} not found"}, 404)
            elif self.command == "DELETE":
                api.delete(path)
                self.answer({"kind": "Status", "apiVersion": "v1", "status": "Success"})
            else:
                self.answer(api.objects[path])

        do_GET = do_PATCH = do_DELETE = reply

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "test", "user": {"token": "a"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "team-a"}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    try:
        yield connect()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def serve(api: Api, cluster: Cluster, objects: list[Object]) -> bool:
    api.requests.clear()
    before = deployment.apply(cluster, RUN, objects)
    deployment.wait(cluster, RUN, objects[0], 10, lambda text: pytest.fail(text))
    deployment.prune(cluster, RUN, before.maps)
    return before.served


def test_the_deployment_owns_the_other_objects_and_gets_pods_only_after_them(
    api: Api, cluster: Cluster, tmp_path: Path
) -> None:
    objects = rendered("tensorflow-serving", tmp_path, code=(b"one",))
    assert serve(api, cluster, objects) is False
    patched = [name for method, name in api.requests if method == "PATCH"]
    assert patched == [f"{RUN}-serve", *(each["metadata"]["name"] for each in objects[1:]), f"{RUN}-serve"]
    applied = next(each for each in api.objects.values() if each["kind"] == "Deployment")
    assert applied["spec"]["replicas"] == 2 and applied["metadata"]["generation"] == 2
    owners = [each["metadata"]["ownerReferences"] for each in api.objects.values() if each["kind"] in OWNED]
    assert len(owners) == len(objects) - 1
    assert {owner["uid"] for [owner] in owners} == {applied["metadata"]["uid"]}
    sent = api.objects[f"/api/v1/namespaces/team-a/configmaps/{objects[3]['metadata']['name']}"]
    assert sent["binaryData"] == objects[3]["binaryData"]


def test_an_update_sends_changes_and_deletes_unused_objects(api: Api, cluster: Cluster, tmp_path: Path) -> None:
    serve(api, cluster, rendered("tensorflow-serving", tmp_path, code=(b"one",)))
    before = api.names("ConfigMap")
    changed = rendered("tensorflow-serving", tmp_path, "step-240-g3", code=(b"other",))
    assert serve(api, cluster, changed) is True
    [new] = api.names("ConfigMap") - before
    [old] = before - api.names("ConfigMap")
    assert "-code-00-" in new and "-code-00-" in old
    sent = [name for method, name in api.requests if method == "PATCH" and name in before | {new}]
    assert sent == [new] and ("DELETE", old) in api.requests


def test_stop_deletes_all_objects_and_fails_if_nothing_is_served(api: Api, cluster: Cluster, tmp_path: Path) -> None:
    serve(api, cluster, rendered("paceline-serve", tmp_path))
    deployment.stop(cluster, RUN)
    assert api.objects == {}
    with pytest.raises(deployment.NotServed, match=rf"{RUN} is not served in namespace team-a \(context test\)"):
        deployment.stop(cluster, RUN)


@pytest.mark.parametrize("kind", ["Deployment", "Service"])
def test_an_object_with_the_same_name_that_is_not_ours_is_left_alone(
    api: Api, cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    """Another run may have this name, or the user may have named the wrong run."""
    objects = rendered("tensorflow-serving", tmp_path)
    foreign = next(each for each in objects if each["kind"] == kind)
    path = PATHS[kind] + f"{RUN}-serve"
    api.apply(path, {**foreign, "metadata": {"name": f"{RUN}-serve", "labels": {"paceline.dev/run": "other"}}})
    message = rf"the {kind} {RUN}-serve in namespace team-a \(context test\) does not belong to {RUN}"
    with pytest.raises(deployment.NotServed, match=message):
        deployment.apply(cluster, RUN, objects)
    with pytest.raises(deployment.NotServed, match=message if kind == "Deployment" else "is not served"):
        deployment.stop(cluster, RUN)
    assert len(api.objects) == 1


def test_of_two_concurrent_updates_the_first_fails_and_deletes_nothing_of_the_other(
    api: Api, cluster: Cluster, tmp_path: Path
) -> None:
    mine = rendered("tensorflow-serving", tmp_path, code=(b"mine",))
    other = rendered("tensorflow-serving", tmp_path, code=(b"other",))
    before = deployment.apply(cluster, RUN, mine)
    later = deployment.apply(cluster, RUN, other)
    with pytest.raises(deployment.NotServed, match="another update has replaced this one"):
        deployment.wait(cluster, RUN, mine[0], 10, lambda text: pytest.fail(text))
    both = api.names("ConfigMap")
    deployment.prune(cluster, RUN, before.maps)
    assert api.names("ConfigMap") == both
    deployment.prune(cluster, RUN, later.maps)
    assert api.names("ConfigMap") == {each["metadata"]["name"] for each in other if each["kind"] == "ConfigMap"}


def pod(container: str, state: Object, last: Object | None = None, restarts: int = 0) -> Object:
    container_status: Object = {
        "name": container,
        "image": "a/b:1",
        "imageID": "",
        "ready": False,
        "restartCount": restarts,
    }
    container_status |= {"state": state, "lastState": last or {}}
    kind = "initContainerStatuses" if container == "export" else "containerStatuses"
    pod_object: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "uid": "u"},
        "spec": {"containers": []},
    }
    return {**pod_object, "status": {"phase": "Pending", kind: [container_status]}}


def unschedulable(message: str) -> Object:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"metadata": {"name": "p", "uid": "u"}, "status": {"phase": "Pending", "conditions": [condition]}}


def ended(code: int, message: str, reason: str = "Error") -> Object:
    return {"terminated": {"exitCode": code, "message": message, "reason": reason}}


BACK_OFF: Object = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}


@pytest.mark.parametrize(
    ("pod_object", "message", "final"),
    [
        (pod("export", ended(66, "paceline: it failed")), "p: it failed (image a/b:1)", True),
        (pod("export", BACK_OFF, ended(1, "paceline: s3://a is away")), "p: s3://a is away", False),
        (pod("export", BACK_OFF, ended(1, "Traceback\nOSError: no room\n"), 1),
         "p: the export ended with exit code 1: OSError: no room", False),
        (pod("export", BACK_OFF, ended(137, ""), 3), "p: the export ended with exit code 137", True),
        (pod("export", BACK_OFF, ended(137, "", "OOMKilled"), 3),
         "p: the export was killed: out of memory; raise serve.memory", True),
        (pod("export", BACK_OFF, ended(255, "exec /bin/sh: exec format error"), 1),
         "p: the image a/b:1 is for another kind of processor (exec format error): use an image for these nodes", True),
        (unschedulable("0/3 nodes are available: 3 Insufficient cpu."),
         "p: no node fits (0 of 3): 3 without enough cpu free; wait for free resources, or request less (`serve.cpu`, "
         "`serve.memory`, `serve.gpus`)", False),
        (pod("server", BACK_OFF, ended(1, "a\nNo module named paceline\n"), 1),
         "p: the server ended with exit code 1: No module named paceline", False),
        (pod("server", BACK_OFF, ended(1, ""), 3), "p: the server ended with exit code 1", True),
        (pod("server", BACK_OFF, ended(137, "", "OOMKilled"), 1),
         "p: the server was killed: out of memory; raise serve.memory", False),
        (pod("server", {"waiting": {"reason": "InvalidImageName", "message": "no"}}),
         "p: the image a/b:1 cannot be pulled: no; check serve.image and image_pull_secrets", True),
    ],
)  # fmt: skip
def test_why_a_pod_does_not_serve(pod_object: Object, message: str, final: bool) -> None:
    reason = unready_reasons.of_pod(pod_object)
    assert reason is not None and (str(reason), reason.final) == (message, final)


def add_pod(api: Api, objects: list[Object], owned: bool, name: str = "p") -> None:
    """A pod that has failed, with the labels of the pods that serve. `owned`: by the Deployment."""
    live = next(each for each in api.objects.values() if each["kind"] == "Deployment")
    owner = live["metadata"]["uid"] if owned else "another"
    set_name = "own" if owned else "theirs"
    owners = [{"apiVersion": "apps/v1", "kind": "Deployment", "name": "d", "uid": owner, "controller": True}]
    replica_set = {"metadata": {"name": set_name, "uid": f"uid-of-{set_name}", "ownerReferences": owners}}
    api.objects[f"/apis/apps/v1/namespaces/team-a/replicasets/{set_name}"] = {
        **replica_set,
        "kind": "ReplicaSet",
        "spec": {"selector": {}},
    }
    reference = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": set_name, "uid": f"uid-of-{set_name}"}
    failed = pod("export", ended(66, "paceline: it failed"))
    failed["metadata"] |= {"name": name, "labels": objects[0]["spec"]["template"]["metadata"]["labels"]}
    failed["metadata"] |= {"uid": name, "ownerReferences": [{**reference, "controller": True}]}
    failed["spec"] |= {"nodeName": "n1"}
    api.objects[f"{PATHS['Pod']}{name}"] = failed


def test_objects_of_others_with_the_same_labels_are_not_part_of_it(
    api: Api, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not fail an update, are not deleted, and do not delay the end."""
    objects = rendered("paceline-serve", tmp_path)
    api.stuck = True
    deployment.apply(cluster, RUN, objects)
    add_pod(api, objects, owned=False, name="theirs")
    theirs = {"kind": "ConfigMap", "metadata": {"name": "theirs", "labels": {"paceline.dev/serves": RUN}}}
    api.apply("/api/v1/namespaces/team-a/configmaps/theirs", theirs)
    with pytest.raises(deployment.NotServed, match=r"^no progress within 0.1 s: its pods are not ready$"):
        deployment.wait(cluster, RUN, objects[0], 0.1, lambda text: pytest.fail(text))
    api.stuck = False
    serve(api, cluster, objects)
    assert {"theirs"} == api.names("Pod") and "theirs" in api.names("ConfigMap")
    monkeypatch.setattr(deployment, "DELETION_S", 0.0)
    deployment.stop(cluster, RUN)
    assert api.names("Pod") == api.names("ConfigMap") == {"theirs"} and not api.names("Deployment")


def test_a_failed_update_is_told_apart_from_the_previous_one(api: Api, cluster: Cluster, tmp_path: Path) -> None:
    """The pod of a failed update still exists when the next one starts; requesting the same again deletes it."""
    first, second = rendered("paceline-serve", tmp_path), rendered("paceline-serve", tmp_path, "step-240-g3")
    api.stuck = True
    deployment.apply(cluster, RUN, first)
    add_pod(api, first, owned=True)
    with pytest.raises(deployment.NotServed, match=r"^p: it failed"):
        deployment.wait(cluster, RUN, first[0], 10, lambda text: pytest.fail(text))
    deployment.apply(cluster, RUN, second)
    with pytest.raises(deployment.NotServed, match=r"^no progress within 0.1 s: its pods are not ready$"):
        deployment.wait(cluster, RUN, second[0], 0.1, lambda text: pytest.fail(text))
    deployment.apply(cluster, RUN, first)
    assert api.names("Pod") == {"p"}
    deployment.apply(cluster, RUN, first)
    assert api.names("Pod") == set()


def test_the_limit_applies_to_each_step_and_an_unreachable_cluster_is_waited_for(
    api: Api, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One poll per step of the update, each as long after the previous one as the limit allows."""
    objects = rendered("tensorflow-serving", tmp_path)
    deployment.apply(cluster, RUN, objects)
    live = next(each for each in api.objects.values() if each["kind"] == "Deployment")
    steps = iter([(3, 1, 2), None, (3, 2, 2), (3, 2, 3), (2, 2, 2)])
    clock = [0.0]

    def next_step(seconds: float) -> None:
        clock[0] += 9.0 if state["step"] is None else 4.0
        state["step"] = step = next(steps)
        if step is not None:
            live["status"] |= dict(zip(("replicas", "updatedReplicas", "availableReplicas"), step, strict=True))

    state: dict[str, Any] = {"step": ()}
    next_step(0)
    find_deployment = deployment._find_deployment

    def find_unless_unreachable(*args: Any) -> Any:
        if state["step"] is None:
            raise Unreachable("no cluster answers")
        return find_deployment(*args)

    messages: list[str] = []
    monkeypatch.setattr(deployment, "_find_deployment", find_unless_unreachable)
    monkeypatch.setattr(deployment.time, "sleep", next_step)
    monkeypatch.setattr(deployment.time, "monotonic", lambda: clock[0])
    deployment.wait(cluster, RUN, objects[0], 14, messages.append)
    assert clock[0] > 14 and messages == ["no cluster answers"]


@pytest.mark.parametrize(
    ("modes", "one_node"),
    [(["ReadWriteOnce"], True), (["ReadWriteMany"], False), (["ReadOnlyMany"], False),
     (["ReadWriteOnce", "ReadOnlyMany"], True), (["ReadWriteOncePod"], None), ([], None)],
)  # fmt: skip
def test_claims_that_require_one_node_are_recognized(
    api: Api, cluster: Cluster, modes: list[str], one_node: bool | None
) -> None:
    if modes:
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "kept"}}
        api.apply(f"{PATHS['PersistentVolumeClaim']}kept", {**claim, "spec": {"accessModes": modes}})
    if one_node is None:
        message = (
            "the claim kept is ReadWriteOncePod: only one pod" if modes else "there is no PersistentVolumeClaim kept"
        )
        with pytest.raises(deployment.NotServed, match=message):
            volume_claims.need_one_node(cluster, ["kept"])
    else:
        assert volume_claims.need_one_node(cluster, ["kept"]) is one_node
    assert volume_claims.need_one_node(cluster, []) is False


def test_messages_for_serving_pods_name_the_fields_of_serve(cluster: Cluster) -> None:
    def reason_text(message: str) -> str:
        condition = {"type": "ReplicaFailure", "status": "True", "message": message}
        deployment_object = {
            "metadata": {"name": "d", "generation": 1},
            "status": {"observedGeneration": 1, "conditions": [condition]},
        }
        return str(unready_reasons.why(cluster, [], deployment_object)[0])

    assert reason_text('pods "d-1" is forbidden: failed quota: small: must specify limits.cpu').endswith(
        "; set `serve.cpu` and `serve.memory`, or ask an administrator of the cluster"
    )
    evicted = {"reason": "Evicted", "message": "The node was low on resource: memory."}
    assert str(unready_reasons.of_pod({"metadata": {"name": "p"}, "status": evicted})).endswith("raise `serve.memory`")
    lost = {"metadata": {"name": "p"}, "status": {"reason": "NodeLost", "message": "gone"}}
    assert str(unready_reasons.of_pod(lost)) == "p: its node was lost: gone; another pod is created"


def test_serve_serves_the_newest_snapshot_and_prints_its_address(
    api: Api, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a folder instead of a bucket."""
    store = FolderStore(str(tmp_path / "store"))
    committed.life(store, tmp_path / "scratch", RUN)
    snapshots = SnapshotRepository(store, RUN)
    source = Source(RUN, "s3://training/digits", snapshots, snapshots, StoredRunFiles(store, RUN))
    monkeypatch.setattr(kubernetes_serving, "_source", lambda *_: source)
    monkeypatch.setattr(prepare, "library_parts", lambda: (b"a book",))
    (tmp_path / "train.py").touch()
    job = tmp_path / "job.yaml"
    text, _ = JOBS["tensorflow-serving"]
    job.write_text(HEAD + text.replace("NodePort", "LoadBalancer"))
    assert serving.serve_on_kubernetes(RUN, None, "", str(job), "", None, None, "") == 0
    output = capsys.readouterr()
    assert output.out == f"http://{RUN}-serve.team-a:8501/v1/models/digits:predict\n"
    assert "step-40-g2 is served inside the cluster, and at the address of the Service" in output.err
    deployment = next(each for each in api.objects.values() if each["kind"] == "Deployment")
    settings = json.loads(deployment["spec"]["template"]["spec"]["initContainers"][0]["env"][0]["value"])
    assert (settings["snapshot"], settings["place"]) == ("step-40-g2", "s3://training/digits")
    api.stuck = True
    job.write_text(HEAD + text.replace("10m", "1s"))
    for note in ("the previous model is still served; ", ""):
        with pytest.raises(PacelineError) as failed:
            serving.serve_on_kubernetes(RUN, "10", "", str(job), "", None, None, "")
        stop = f"paceline serve {RUN} --on kubernetes --context test --namespace team-a --stop"
        assert str(failed.value) == (
            f"step-10-g1 is not served: no progress within 1 s: its pods are not ready; {note}`{stop}` removes it"
        )
    assert "pods that start later also need step-10-g1; `snapshots.keep`" in capsys.readouterr().err
    assert serving.stop_on_kubernetes(RUN, None, "team-a") == 0 and api.objects == {}
    job.write_text(HEAD + text.replace("serve: {replicas: 2, memory: 2Gi, service: NodePort}\n", ""))
    with pytest.raises(job_programs.NoProgram, match="has no `serve`; add `serve: "):
        serving.serve_on_kubernetes(RUN, None, "", str(job), "", None, None, "")


def test_a_prefix_of_several_runs_does_not_select_a_run_to_stop(
    api: Api, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(kubernetes_serving, "refresh", lambda folder, notify: None)
    for run in ("digits-3f9a", "digits-77aa"):
        folder = tmp_path / "home" / "runs" / run
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps({"kubernetes": {"context": "test", "namespace": "team-b"}}))
    with pytest.raises(run_folders.NoRun, match="'digits' matches 2 runs: "):
        serving.stop_on_kubernetes("digits", None, None)
    with pytest.raises(run_folders.NoRun, match="'digits' matches 2 runs: "):
        kubernetes_serving._source("digits", None, None, lambda text: None, "")
    with pytest.raises(deployment.NotServed, match=r"other is not served in namespace team-a \(context test\)"):
        serving.stop_on_kubernetes("other", None, None)
    with pytest.raises(deployment.NotServed, match=r"digits-77aa is not served in namespace team-b \(context test\)"):
        serving.stop_on_kubernetes("digits-7", None, None)
    assert not [request for request in api.requests if request[0] == "DELETE"]


def test_an_update_is_complete_when_no_old_pods_are_left() -> None:
    def deployment_object(**status: int) -> Object:
        return {"metadata": {"generation": 4}, "spec": {"replicas": 2}, "status": {"observedGeneration": 4, **status}}

    complete = {"replicas": 2, "updatedReplicas": 2, "availableReplicas": 2}
    assert deployment.rolled_out(deployment_object(**complete))
    assert not deployment.rolled_out(deployment_object(**complete, observedGeneration=3))
    assert not deployment.rolled_out(deployment_object(**{**complete, "replicas": 3}))
    assert not deployment.rolled_out(deployment_object(**{**complete, "updatedReplicas": 1}))
    assert not deployment.rolled_out(deployment_object())


def test_snapshots_that_pods_cannot_reach_are_rejected(tmp_path: Path) -> None:
    recorded.write(tmp_path, RUN, report=recorded.REPORT)
    result = call(tmp_path, "serve", RUN, "--on", "kubernetes")
    assert result.returncode == 2 and result.stdout == ""
    assert f"the snapshots of {RUN} are on this machine, where serving pods cannot read them" in result.stderr
    assert "`snapshots: {to: s3://bucket/path}`" in result.stderr
    assert "press Ctrl-C" in call(tmp_path, "serve", RUN, "--stop").stderr
    assert (
        "cannot be used with --on kubernetes"
        in call(tmp_path, "serve", RUN, "--on", "kubernetes", "--port", "1").stderr
    )
