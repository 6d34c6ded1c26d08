"""What serves a model is applied, followed and taken away: with an API server that keeps objects, and runs nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from paceline.backends.kubernetes import claims, deployed, prepare, reasons, unready
from paceline.backends.kubernetes.cluster import Cluster, Unreachable, connect
from paceline.cli import serving
from paceline.cli.say import Failure
from paceline.storage.folder import Folder
from paceline.storage.kept import Kept
from paceline.storage.snapshots import Snapshots
from paceline.view import programs, runs
from paceline.view.places import Source
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
    """Objects by path. What a Deployment owns goes with it, as on a cluster."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.asked: list[tuple[str, str]] = []
        self.count = 0
        self.stuck = False  # no pod gets ready

    def apply(self, path: str, given: Object) -> Object:
        before = self.objects.get(path)
        self.count += before is None
        own = (
            before["metadata"]
            if before
            else {"uid": f"uid-{self.count}", "creationTimestamp": "2026-11-16T00:00:00Z", "generation": 0}
        )
        own["generation"] += 1
        kept = {name: own[name] for name in ("uid", "creationTimestamp", "generation")}
        made = {**given, "metadata": {**given["metadata"], **kept}}
        if given["kind"] == "Deployment":
            counts = dict.fromkeys(("replicas", "updatedReplicas", "availableReplicas"), given["spec"]["replicas"])
            made["status"] = {"observedGeneration": kept["generation"], **({} if self.stuck else counts)}
        self.objects[path] = made
        return made

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
            api.asked.append((self.command, path.rpartition("/")[2]))
            if self.command == "PATCH":
                assert self.headers["Content-Type"] == "application/apply-patch+yaml"
                self.answer(api.apply(path, json.loads(body)))
            elif path.endswith(("/configmaps", "/pods", "/events")):
                query = parse_qs(urlsplit(self.path).query)
                wanted = [each.split("=") for each in query.get("labelSelector", [""])[0].split(",") if each]
                found = [
                    each
                    for each in api.below(path)
                    if all(each["metadata"].get("labels", {}).get(name) == value for name, value in wanted)
                ]
                self.answer({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": found})
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


def served(api: Api, cluster: Cluster, objects: list[Object]) -> bool:
    api.asked.clear()
    before = deployed.apply(cluster, RUN, objects)
    deployed.wait(cluster, RUN, objects[0], 10, lambda text: pytest.fail(text))
    deployed.prune(cluster, RUN, before.maps)
    return before.served


def test_the_deployment_owns_the_rest_and_has_pods_only_when_that_is_there(
    api: Api, cluster: Cluster, tmp_path: Path
) -> None:
    objects = rendered("tensorflow-serving", tmp_path, code=(b"one",))
    assert served(api, cluster, objects) is False
    patched = [name for method, name in api.asked if method == "PATCH"]
    assert patched == [f"{RUN}-serve", *(each["metadata"]["name"] for each in objects[1:]), f"{RUN}-serve"]
    deployment = next(each for each in api.objects.values() if each["kind"] == "Deployment")
    assert deployment["spec"]["replicas"] == 2 and deployment["metadata"]["generation"] == 2
    owners = [each["metadata"]["ownerReferences"] for each in api.objects.values() if each["kind"] in OWNED]
    assert len(owners) == len(objects) - 1
    assert {owner["uid"] for [owner] in owners} == {deployment["metadata"]["uid"]}
    sent = api.objects[f"/api/v1/namespaces/team-a/configmaps/{objects[3]['metadata']['name']}"]
    assert sent["binaryData"] == objects[3]["binaryData"]


def test_an_update_sends_what_has_changed_and_deletes_what_nobody_needs(
    api: Api, cluster: Cluster, tmp_path: Path
) -> None:
    served(api, cluster, rendered("tensorflow-serving", tmp_path, code=(b"one",)))
    before = api.names("ConfigMap")
    changed = rendered("tensorflow-serving", tmp_path, "step-240-g3", code=(b"other",))
    assert served(api, cluster, changed) is True
    [new] = api.names("ConfigMap") - before
    [old] = before - api.names("ConfigMap")
    assert "-code-00-" in new and "-code-00-" in old
    sent = [name for method, name in api.asked if method == "PATCH" and name in before | {new}]
    assert sent == [new] and ("DELETE", old) in api.asked


def test_it_is_taken_away_and_what_is_not_there_is_said(api: Api, cluster: Cluster, tmp_path: Path) -> None:
    served(api, cluster, rendered("paceline-serve", tmp_path))
    deployed.stop(cluster, RUN)
    assert api.objects == {}
    with pytest.raises(deployed.NotServed, match=f"nothing serves {RUN} in team-a of test"):
        deployed.stop(cluster, RUN)


@pytest.mark.parametrize("kind", ["Deployment", "Service"])
def test_what_is_called_as_it_would_be_is_left_alone(api: Api, cluster: Cluster, tmp_path: Path, kind: str) -> None:
    """Another run may be called so, and whoever names a run may be wrong."""
    objects = rendered("tensorflow-serving", tmp_path)
    found = next(each for each in objects if each["kind"] == kind)
    path = PATHS[kind] + f"{RUN}-serve"
    api.apply(path, {**found, "metadata": {"name": f"{RUN}-serve", "labels": {"paceline.dev/run": "other"}}})
    left = f"there is a {kind} {RUN}-serve in team-a of test that is not for {RUN}: it is left alone"
    with pytest.raises(deployed.NotServed, match=left):
        deployed.apply(cluster, RUN, objects)
    with pytest.raises(deployed.NotServed, match=left if kind == "Deployment" else "nothing serves"):
        deployed.stop(cluster, RUN)
    assert len(api.objects) == 1


def test_of_two_who_serve_at_once_the_first_is_told_and_deletes_nothing_of_the_other(
    api: Api, cluster: Cluster, tmp_path: Path
) -> None:
    mine = rendered("tensorflow-serving", tmp_path, code=(b"mine",))
    other = rendered("tensorflow-serving", tmp_path, code=(b"other",))
    before = deployed.apply(cluster, RUN, mine)
    theirs = deployed.apply(cluster, RUN, other)
    with pytest.raises(deployed.NotServed, match="somebody has it serve something else meanwhile"):
        deployed.wait(cluster, RUN, mine[0], 10, lambda text: pytest.fail(text))
    both = api.names("ConfigMap")
    deployed.prune(cluster, RUN, before.maps)
    assert api.names("ConfigMap") == both
    deployed.prune(cluster, RUN, theirs.maps)
    assert api.names("ConfigMap") == {each["metadata"]["name"] for each in other if each["kind"] == "ConfigMap"}


def pod(container: str, state: Object, last: Object | None = None, restarts: int = 0) -> Object:
    told: Object = {"name": container, "image": "a/b:1", "imageID": "", "ready": False, "restartCount": restarts}
    told |= {"state": state, "lastState": last or {}}
    kind = "initContainerStatuses" if container == "export" else "containerStatuses"
    made: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "uid": "u"},
        "spec": {"containers": []},
    }
    return {**made, "status": {"phase": "Pending", kind: [told]}}


def unschedulable(message: str) -> Object:
    told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"metadata": {"name": "p", "uid": "u"}, "status": {"phase": "Pending", "conditions": [told]}}


def ended(code: int, message: str, reason: str = "Error") -> Object:
    return {"terminated": {"exitCode": code, "message": message, "reason": reason}}


BACK_OFF: Object = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}


@pytest.mark.parametrize(
    ("found", "words", "final"),
    [
        (pod("export", ended(66, "paceline: it failed")), "p: it failed (image a/b:1)", True),
        (pod("export", BACK_OFF, ended(1, "paceline: s3://a is away")), "p: s3://a is away", False),
        (pod("export", BACK_OFF, ended(1, "Traceback\nOSError: no room\n"), 1),
         "p: the export ended with exit code 1: OSError: no room", False),
        (pod("export", BACK_OFF, ended(137, ""), 3), "p: the export ended with exit code 137", True),
        (pod("export", BACK_OFF, ended(137, "", "OOMKilled"), 3),
         "p: export was killed for want of memory: raise serve.memory", True),
        (pod("export", BACK_OFF, ended(255, "exec /bin/sh: exec format error"), 1),
         "p: the image a/b:1 is for another kind of processor (exec format error): name one for these nodes", True),
        (unschedulable("0/3 nodes are available: 3 Insufficient cpu."),
         "p: no node takes it (0 of 3): 3 without enough cpu free; it waits for room, or ask for less (`serve.cpu`, "
         "`serve.memory`, `serve.gpus`)", False),
        (pod("server", BACK_OFF, ended(1, "a\nNo module named paceline\n"), 1),
         "p: the server ended with exit code 1: No module named paceline", False),
        (pod("server", BACK_OFF, ended(1, ""), 3), "p: the server ended with exit code 1", True),
        (pod("server", BACK_OFF, ended(137, "", "OOMKilled"), 1),
         "p: server was killed for want of memory: raise serve.memory", False),
        (pod("server", {"waiting": {"reason": "InvalidImageName", "message": "no"}}),
         "p: the image a/b:1 cannot be had: no; is serve.image right, or image_pull_secrets missing?", True),
    ],
)  # fmt: skip
def test_why_a_pod_does_not_serve(found: Object, words: str, final: bool) -> None:
    reason = unready.of_pod(found)
    assert reason is not None and (str(reason), reason.final) == (words, final)


def test_an_update_that_cannot_be_is_told_from_the_one_before(api: Api, cluster: Cluster, tmp_path: Path) -> None:
    """The pod of an update that failed is still there when the next begins, and goes when the same is asked again."""
    first, second = rendered("paceline-serve", tmp_path), rendered("paceline-serve", tmp_path, "step-240-g3")
    api.stuck = True
    deployed.apply(cluster, RUN, first)
    failed = pod("export", ended(66, "paceline: it failed"))
    failed["metadata"] |= {"labels": first[0]["spec"]["template"]["metadata"]["labels"]}
    failed["spec"] |= {"nodeName": "n1"}
    api.objects[f"{PATHS['Pod']}p"] = failed
    with pytest.raises(deployed.NotServed, match=r"^p: it failed"):
        deployed.wait(cluster, RUN, first[0], 10, lambda text: pytest.fail(text))
    deployed.apply(cluster, RUN, second)
    with pytest.raises(deployed.NotServed, match=r"^no progress within 0.1 s: its pods are not ready$"):
        deployed.wait(cluster, RUN, second[0], 0.1, lambda text: pytest.fail(text))
    deployed.apply(cluster, RUN, first)
    assert api.names("Pod") == {"p"}
    deployed.apply(cluster, RUN, first)
    assert api.names("Pod") == set()


def test_the_limit_is_for_each_pod_and_no_answer_is_waited_for(
    api: Api, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many looks as the update has steps, each as long after the one before as the limit allows."""
    objects = rendered("tensorflow-serving", tmp_path)
    deployed.apply(cluster, RUN, objects)
    live = next(each for each in api.objects.values() if each["kind"] == "Deployment")
    steps = iter([(3, 1, 2), None, (3, 2, 2), (3, 2, 3), (2, 2, 2)])
    clock = [0.0]

    def next_step(seconds: float) -> None:
        clock[0] += 9.0 if away["now"] is None else 4.0
        away["now"] = step = next(steps)
        if step is not None:
            live["status"] |= dict(zip(("replicas", "updatedReplicas", "availableReplicas"), step, strict=True))

    away: dict[str, Any] = {"now": ()}
    next_step(0)
    found = deployed._found

    def answered(*given: Any) -> Any:
        if away["now"] is None:
            raise Unreachable("no cluster answers")
        return found(*given)

    said: list[str] = []
    monkeypatch.setattr(deployed, "_found", answered)
    monkeypatch.setattr(deployed.time, "sleep", next_step)
    monkeypatch.setattr(deployed.time, "monotonic", lambda: clock[0])
    deployed.wait(cluster, RUN, objects[0], 14, said.append)
    assert clock[0] > 14 and said == ["no cluster answers"]


@pytest.mark.parametrize(
    ("modes", "tied"),
    [(["ReadWriteOnce"], True), (["ReadWriteMany"], False), (["ReadOnlyMany"], False),
     (["ReadWriteOnce", "ReadOnlyMany"], True), (["ReadWriteOncePod"], None), ([], None)],
)  # fmt: skip
def test_claims_that_keep_pods_on_one_node_are_told_apart(
    api: Api, cluster: Cluster, modes: list[str], tied: bool | None
) -> None:
    if modes:
        made = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "kept"}}
        api.apply(f"{PATHS['PersistentVolumeClaim']}kept", {**made, "spec": {"accessModes": modes}})
    if tied is None:
        why = "the claim kept is ReadWriteOncePod, for one pod" if modes else "there is no PersistentVolumeClaim kept"
        with pytest.raises(deployed.NotServed, match=why):
            claims.tied(cluster, ["kept"])
    else:
        assert claims.tied(cluster, ["kept"]) is tied
    assert claims.tied(cluster, []) is False


def test_the_words_for_hosts_of_a_run_are_not_those_for_its_pods(cluster: Cluster) -> None:
    def of(message: str) -> str:
        condition = {"type": "ReplicaFailure", "status": "True", "message": message}
        found = {
            "metadata": {"name": "d", "generation": 1},
            "status": {"observedGeneration": 1, "conditions": [condition]},
        }
        return str(unready.why(cluster, [], found)[0])

    assert of('pods "d-1" is forbidden: failed quota: small: must specify limits.cpu').endswith(
        "; set `serve.cpu` and `serve.memory`, or ask whoever runs the cluster"
    )
    evicted = {"reason": "Evicted", "message": "The node was low on resource: memory."}
    assert str(unready.of_pod({"metadata": {"name": "p"}, "status": evicted})).endswith("raise `serve.memory`")
    lost = {"metadata": {"name": "p"}, "status": {"reason": "NodeLost", "message": "gone"}}
    assert str(unready.of_pod(lost)) == "p: its node is gone: gone; another pod comes"
    for theirs, _ in unready._WORDS:  # all of them are still what is said of hosts
        assert theirs in Path(reasons.__file__).read_text()


def test_the_verb_serves_the_newest_and_says_where(
    api: Api, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a folder in the place of a bucket."""
    store = Folder(str(tmp_path / "place"))
    committed.life(store, tmp_path / "scratch", RUN)
    snapshots = Snapshots(store, RUN)
    found = Source(RUN, "s3://training/digits", snapshots, snapshots, Kept(store, RUN))
    monkeypatch.setattr(serving, "_source", lambda *_: found)
    monkeypatch.setattr(prepare, "library_parts", lambda: (b"a book",))
    (tmp_path / "train.py").touch()
    job = tmp_path / "job.yaml"
    text, _ = JOBS["tensorflow-serving"]
    job.write_text(HEAD + text.replace("NodePort", "LoadBalancer"))
    assert serving.serve_on_kubernetes(RUN, None, "", str(job), "", None, None) == 0
    said = capsys.readouterr()
    assert said.out == f"http://{RUN}-serve.team-a:8501/v1/models/digits:predict\n"
    assert "step-40-g2 is served within the cluster, and at the address that the Service" in said.err
    deployment = next(each for each in api.objects.values() if each["kind"] == "Deployment")
    told = json.loads(deployment["spec"]["template"]["spec"]["initContainers"][0]["env"][0]["value"])
    assert (told["snapshot"], told["place"]) == ("step-40-g2", "s3://training/digits")
    api.stuck = True
    job.write_text(HEAD + text.replace("10m", "1s"))
    for stays in ("what was served before goes on; ", ""):
        with pytest.raises(Failure) as failed:
            serving.serve_on_kubernetes(RUN, "10", "", str(job), "", None, None)
        stop = f"paceline serve {RUN} --on kubernetes --context test -n team-a --stop"
        assert str(failed.value) == (
            f"step-10-g1 is not served: no progress within 1 s: its pods are not ready; {stays}`{stop}` takes it away"
        )
    assert "pods that come later need step-10-g1, too, and `snapshots.keep`" in capsys.readouterr().err
    assert serving.stop_on_kubernetes(RUN, None, "team-a") == 0 and api.objects == {}
    job.write_text(HEAD + text.replace("serve: {replicas: 2, memory: 2Gi, service: NodePort}\n", ""))
    with pytest.raises(programs.NoProgram, match="says nothing of `serve`: write `serve: "):
        serving.serve_on_kubernetes(RUN, None, "", str(job), "", None, None)


def test_a_beginning_of_several_runs_is_no_run_to_stop(
    api: Api, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(serving, "refresh", lambda folder: None)
    for run in ("digits-3f9a", "digits-77aa"):
        folder = tmp_path / "home" / "runs" / run
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps({"kubernetes": {"context": "test", "namespace": "team-b"}}))
    for act in (serving.stop_on_kubernetes, serving._source):
        with pytest.raises(runs.NoRun, match="'digits' is the beginning of 2 runs: "):
            act("digits", None, None)
    with pytest.raises(deployed.NotServed, match="nothing serves other in team-a of test"):
        serving.stop_on_kubernetes("other", None, None)
    with pytest.raises(deployed.NotServed, match="nothing serves digits-77aa in team-b of test"):
        serving.stop_on_kubernetes("digits-7", None, None)
    assert not [asked for asked in api.asked if asked[0] == "DELETE"]


def test_it_is_rolled_out_when_no_other_pods_are_left() -> None:
    def found(**status: int) -> Object:
        return {"metadata": {"generation": 4}, "spec": {"replicas": 2}, "status": {"observedGeneration": 4, **status}}

    done = {"replicas": 2, "updatedReplicas": 2, "availableReplicas": 2}
    assert deployed.rolled_out(found(**done))
    assert not deployed.rolled_out(found(**done, observedGeneration=3))
    assert not deployed.rolled_out(found(**{**done, "replicas": 3}))
    assert not deployed.rolled_out(found(**{**done, "updatedReplicas": 1}))
    assert not deployed.rolled_out(found())


def test_snapshots_that_pods_cannot_reach_are_refused(tmp_path: Path) -> None:
    recorded.write(tmp_path, RUN, report=recorded.REPORT)
    done = call(tmp_path, "serve", RUN, "--on", "kubernetes")
    assert done.returncode == 2 and done.stdout == ""
    assert f"the snapshots of {RUN} are on this machine, where pods that serve it cannot read them" in done.stderr
    assert "`snapshots: {to: s3://bucket/path}`" in done.stderr
    assert "Ctrl-C ends it" in call(tmp_path, "serve", RUN, "--stop").stderr
    assert "are for this machine" in call(tmp_path, "serve", RUN, "--on", "kubernetes", "--port", "1").stderr
