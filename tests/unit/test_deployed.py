"""What serves a model is applied, followed and taken away: with an API server that keeps objects, and runs nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import committed
import pytest
import recorded
from recorded import call
from test_serving import HEAD, JOBS, RUN, rendered

from paceline.backends.kubernetes import deployed, prepare
from paceline.backends.kubernetes.cluster import Cluster, connect
from paceline.cli import serving
from paceline.storage.folder import Folder
from paceline.storage.kept import Kept
from paceline.storage.snapshots import Snapshots
from paceline.view import programs
from paceline.view.places import Source

Object = dict[str, Any]
OWNED = ("Service", "NetworkPolicy", "ConfigMap")


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
    deployed.prune(cluster, RUN, objects)
    return before


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


def test_a_run_that_is_called_as_it_would_be_is_left_alone(api: Api, cluster: Cluster, tmp_path: Path) -> None:
    objects = rendered("tensorflow-serving", tmp_path)
    path = f"/api/v1/namespaces/team-a/services/{RUN}-serve"
    api.apply(path, {**objects[1], "metadata": {"name": f"{RUN}-serve", "labels": {"paceline.dev/run": "other"}}})
    with pytest.raises(deployed.NotServed, match="that is not for"):
        deployed.apply(cluster, RUN, objects)
    assert len(api.objects) == 1


def pod(container: str, state: Object, last: Object | None = None, restarts: int = 0) -> Object:
    told: Object = {"name": container, "image": "a/b:1", "imageID": "", "ready": False, "restartCount": restarts}
    told |= {"state": state, "lastState": last or {}}
    kind = "initContainerStatuses" if container == "export" else "containerStatuses"
    return {"metadata": {"name": "p", "uid": "u"}, "status": {"phase": "Pending", kind: [told]}}


def ended(code: int, message: str, reason: str = "Error") -> Object:
    return {"terminated": {"exitCode": code, "message": message, "reason": reason}}


BACK_OFF: Object = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}


@pytest.mark.parametrize(
    ("found", "words", "final"),
    [
        (pod("export", ended(66, "paceline: it failed")), "p: it failed (image a/b:1)", True),
        (pod("export", BACK_OFF, ended(1, "paceline: s3://a is away")), "p: s3://a is away", False),
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
    reason = deployed.of_pod(found)
    assert reason is not None and (str(reason), reason.final) == (words, final)


def test_an_update_that_cannot_be_is_told_from_the_one_before(api: Api, cluster: Cluster, tmp_path: Path) -> None:
    """The pod of an update that failed is still there when the next begins."""
    first, second = rendered("paceline-serve", tmp_path), rendered("paceline-serve", tmp_path, "step-240-g3")
    api.stuck = True
    labels = first[0]["spec"]["template"]["metadata"]["labels"]
    failed = pod("export", ended(66, "paceline: it failed"))
    failed["metadata"] |= {"labels": labels}
    failed |= {"apiVersion": "v1", "kind": "Pod"}
    api.objects["/api/v1/namespaces/team-a/pods/p"] = failed
    deployed.apply(cluster, RUN, first)
    with pytest.raises(deployed.NotServed, match=r"^p: it failed"):
        deployed.wait(cluster, RUN, first[0], 10, lambda text: pytest.fail(text))
    deployed.apply(cluster, RUN, second)
    with pytest.raises(deployed.NotServed, match=r"^not within 0.1 s: its pods are not ready$"):
        deployed.wait(cluster, RUN, second[0], 0.1, lambda text: pytest.fail(text))


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
    assert serving.stop_on_kubernetes(RUN, None, "team-a") == 0 and api.objects == {}
    job.write_text(HEAD + text.replace("serve: {replicas: 2, memory: 2Gi, service: NodePort}\n", ""))
    with pytest.raises(programs.NoProgram, match="says nothing of `serve`: write `serve: "):
        serving.serve_on_kubernetes(RUN, None, "", str(job), "", None, None)


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
