"""Snapshots of runs on a real cluster: at the captain's pod, in a volume claim, and after the loss of what had them."""

from __future__ import annotations

import json
import signal
import subprocess
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from support.lab import objects
from support.lab.cluster import LabError
from support.people import Person, Run, eventually, lines
from support.saving_on_a_cluster import TRAINING, begun, restored

pytestmark = pytest.mark.timeout(300, func_only=True)

# The first four wait for one another to be committed: none is skipped. Then there are no more until the test asks for
# them: what it looks at meanwhile stays as it is.
IN_TURNS = TRAINING.replace("step % 10 == 0", "step % 10 == 0 and (step <= 40 or os.path.exists('/shared/more'))")
WAITS = "    while step in (10, 20, 30) and not os.path.exists(f'/shared/after-{step}'):\n        time.sleep(0.02)\n"
IN_TURNS = IN_TURNS.replace("    step += 1\n", f"{WAITS}    step += 1\n")


def commits_four(run: Run) -> None:
    for step in (10, 20, 30):
        run.wait("committed", step=step)
        (run.person.shared / f"after-{step}").touch()
    run.wait("committed", step=40)


def listed(person: Person, run: str) -> list[str]:
    """As the place itself has them, newest first."""
    done = person.call("snapshots", "ls", run, "-o", "name")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def got(person: Person, run: str, snapshot: str) -> dict[str, str]:
    """What is in a copy of it."""
    folder = person.folder / f"copy-{uuid.uuid4().hex}"
    done = person.call("snapshots", "get", run, snapshot, "--to", str(folder))
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_text() for path in folder.iterdir()}


def parts_of(step: int) -> dict[str, str]:
    return {**{f"part-{rank}": str(step) for rank in range(3)}, "paceline.json": json.dumps({"parts": 3})}


def stranger(person: Person, *words: str) -> subprocess.CompletedProcess[str]:
    """The same person, who may not run programs in pods."""
    kubeconfig = person.cluster.user("eve", person.namespace)
    role, _ = objects.rights("eve", person.namespace)
    allowed = [[each for each in rule["resources"] if each != "pods/exec"] for rule in role["rules"]]
    rules = [{**rule, "resources": resources} for rule, resources in zip(role["rules"], allowed, strict=True)]
    person.cluster.apply({**role, "rules": rules})

    def may(*right: str) -> bool:
        with suppress(LabError):  # which is how it says no
            return bool(person.cluster.kubectl("auth", "can-i", "create", *right, kubeconfig=kubeconfig))
        return False

    eventually("her rights", lambda: may("jobs") and not may("pods", "--subresource=exec"))
    person.env["KUBECONFIG"], own = str(kubeconfig), person.env["KUBECONFIG"]
    try:
        return person.call(*words)
    finally:
        person.env["KUBECONFIG"] = own


def test_without_a_store_a_run_survives_the_loss_of_a_host_and_of_its_captain(
    person: Person, start: Callable[..., Run]
) -> None:
    run = start(program=IN_TURNS)
    commits_four(run)
    kept = [f"step-{step}-g1" for step in (40, 30, 20)]
    eventually("the first is deleted", lambda: listed(person, run.name) == kept, more=run.said)
    assert got(person, run.name, "40") == parts_of(40)
    assert person.call("snapshots", "verify", run.name, "--all").returncode == 0
    assert person.call("snapshots", "rm", run.name, kept[-1], "--yes").returncode == 0
    assert listed(person, run.name) == kept[:2]
    refused = stranger(person, "snapshots", "ls", run.name)
    assert refused.returncode == 1 and "pods/exec" in refused.stderr and len(refused.stderr.splitlines()) == 1
    (person.shared / "more").touch()
    first = run.wait("committed")
    lost = run.pods("worker")[1]["metadata"]["name"]
    person.cluster.kubectl("delete", "pod", lost, "-n", person.namespace, "--grace-period=1")
    run.wait("generation-formed", count=2)
    assert restored(run) >= first["step"]
    second = run.wait("committed", generation=2)
    captain = run.pods("captain")[0]["metadata"]["name"]
    person.cluster.kubectl("delete", "pod", captain, "-n", person.namespace, "--grace-period=1")
    run.wait("captain-returned")
    eventually("it is brought back", lambda: "brought back from copies" in run.said(), more=run.said)
    run.wait("committed", count=len(run.events("committed")) + 2)
    pid = run.events("task-started", task="worker-2")[-1]["pid"]
    pod = run.pods("worker")[2]["metadata"]["name"]
    person.cluster.kubectl("exec", "-n", person.namespace, pod, "--", "/bin/sh", "-c", f"kill -9 {pid}")
    run.wait("generation-formed", count=3)
    assert restored(run) >= second["step"]
    eventually("all begin from it", lambda: begun(run, "worker-0")[-1] == restored(run), more=run.said)
    person.finish()
    assert run.ends() == 0, run.said()


# Keeps its own checkpoint, in a file that the first worker writes anew in place; all go on from it.
KEEPING = """
import os, pathlib, time
rank, kept = int(os.environ["PACELINE_RANK"]), pathlib.Path("ckpt/state")
step = 0
if kept.exists():
    first, last = kept.read_text().split()
    assert first == last, (first, last)
    step = int(first)
print("start", step, flush=True)
while not pathlib.Path("/shared/finish").exists():
    time.sleep(1.5)
    step += 1
    if rank == 0:
        kept.parent.mkdir(exist_ok=True)
        with kept.open("w", buffering=1) as file:
            print(step, file=file)
            time.sleep(0.3)
            print(step, file=file)
print("done", flush=True)
"""


def test_a_folder_that_is_watched_comes_back_on_pods_that_never_had_it(
    person: Person, start: Callable[..., Run]
) -> None:
    run = start(program=KEEPING, snapshots={"watch": "ckpt/"})
    run.wait("committed", count=2)
    lost = run.pods("worker")[0]["metadata"]["name"]
    person.cluster.kubectl("delete", "pod", lost, "-n", person.namespace, "--grace-period=1")
    run.wait("generation-formed", count=2)
    tasks = [f"worker-{number}" for number in range(3)]
    eventually("all go on", lambda: {len(begun(run, task)) for task in tasks} == {2}, more=run.said)
    [step] = {begun(run, task)[-1] for task in tasks}
    assert step >= 2 and restored(run) >= 2
    run.wait("committed", generation=2)
    person.finish()
    assert run.ends() == 0, run.said()
    assert "warning" not in run.said(), run.said()


def test_in_a_claim_snapshots_outlive_their_run_and_its_pods_and_others_start_from_them(
    person: Person, start: Callable[..., Run]
) -> None:
    node = person.cluster.nodes[0]
    folder = person.cluster.local_volume(person.namespace, "kept", node)
    run = start(program=IN_TURNS, snapshots={"to": "claim://kept/of digits", "keep": 2})
    commits_four(run)
    assert [pod["spec"]["nodeName"] for pod in run.pods("captain")] == [node]
    newest, older = "step-40-g1", "step-30-g1"
    eventually("the others are deleted", lambda: listed(person, run.name) == [newest, older], more=run.said)
    shown = json.loads(person.call("snapshots", "show", run.name, "-o", "json").stdout)
    assert (shown["snapshot"], shown["place"]) == (newest, f"claim://kept/of digits/{run.name}/step-40-g1")
    assert [part["task"] for part in shown["parts"]] == [f"worker-{n}" for n in (0, 0, 1, 1, 2, 2)]
    assert got(person, run.name, newest) == parts_of(40)
    (folder / "of digits" / run.name / older / "worker-1" / "part-1").write_text("41")
    done = person.call("snapshots", "verify", run.name, "--all")
    assert done.returncode == 1 and f"{older}/worker-1/part-1 is damaged: its digest is another" in done.stdout
    assert f"{newest} is as it was committed: 6 files" in done.stdout
    done = person.call("snapshots", "rm", run.name, newest, "--yes")
    assert done.returncode == 1 and "still runs: it would go on from there" in done.stderr
    done = person.call("snapshots", "rm", f"claim://kept/of digits/{run.name}", older, "--yes")
    assert (done.returncode, done.stderr) == (0, f"deleted {older}\n")
    assert not (folder / "of digits" / run.name / older).exists() and listed(person, run.name) == [newest]
    captain = run.pods("captain")[0]["metadata"]["name"]
    everything = ("exec", "-n", person.namespace, captain, "--", "/bin/sh", "-c", "cat /proc/[0-9]*/cmdline || true")
    eventually("what looked has gone", lambda: "tempfile" not in person.cluster.kubectl(*everything))
    (person.shared / "more").touch()
    person.cluster.kubectl("delete", "pod", captain, "-n", person.namespace, "--grace-period=1")
    run.wait("captain-returned")
    pid = run.events("task-started", task="worker-0")[-1]["pid"]
    pod = run.pods("worker")[0]["metadata"]["name"]
    person.cluster.kubectl("exec", "-n", person.namespace, pod, "--", "/bin/sh", "-c", f"kill -9 {pid}")
    run.wait("committed", generation=2)
    assert restored(run) >= 40
    person.finish()
    assert run.ends() == 0, run.said()
    last = run.events("committed")[-1]["step"]
    assert got(person, run.name, str(last)) == parts_of(last)
    done = person.call("delete", "--yes", run.name)
    assert done.returncode == 0 and f"`paceline delete --snapshots {run.name}` deletes them" in done.stderr
    kept: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in (folder / "of digits" / run.name).glob("step-*/manifest.json")
    ]
    assert len(kept) == 2 and max(each["step"] for each in kept) == last
    assert all(set(each["parts"]) == {"worker-0", "worker-1", "worker-2"} for each in kept)
    where = f"claim://kept/of digits/{run.name}"
    assert printed(person, where)["worker-2"][-1] == "done"
    named = f"{where}/{listed(person, run.name)[0]}"
    assert named.startswith(f"{where}/step-{last}-g")
    alone = "import os; print('start', open(os.environ['PACELINE_RESTORE'] + '/part-2').read())"
    by_id = start(program=alone, workers=1, snapshots={"from": run.name})
    by_place = start(program=alone, workers=1, snapshots={"from": named, "to": "claim://kept/next"})
    for other, given in ((by_id, where), (by_place, named)):
        assert other.ends() == 0, other.said()
        assert [each["origin"] for each in other.events("committed")] == [named]
        assert (restored(other), begun(other, "worker-0")) == (last, [last])
        assert f"from         {given}\n" in person.call("status", other.name).stdout
    copy = folder / "next" / by_place.name / f"step-{last}-g0"
    assert json.loads((copy / "manifest.json").read_text())["origin"] == named
    assert person.call("delete", "--yes", by_id.name, by_place.name).returncode == 0
    done = person.call("delete", "--snapshots", "--yes", run.name)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, f"deleted the snapshots of {run.name}"), done.stderr
    assert list((folder / "of digits").iterdir()) == []
    assert person.call("snapshots", "ls", run.name).returncode == 2
    eventually("nothing is left", lambda: not person.cluster.get("jobs,pods", "-n", person.namespace)["items"])


def printed(person: Person, where: str) -> dict[str, list[str]]:
    """The output of each task, as `paceline logs` has it."""
    done = person.call("logs", where, "-o", "json")
    assert done.returncode == 0 and not done.stderr, done.stderr
    found: dict[str, list[str]] = {}
    for line in map(json.loads, done.stdout.splitlines()):
        found.setdefault(line["task"], []).append(line["text"])
    return found


def stands(person: Person, where: str) -> tuple[str, int, int]:
    done = person.call("status", where, "-o", "json")
    assert done.returncode == 0 and not done.stderr, done.stderr
    status = json.loads(done.stdout)
    return status["status"], status["generations"], status["steps"]


def test_in_a_bucket_with_an_image_that_knows_nothing_of_buckets(
    person: Person, start: Callable[..., Run], bucket: dict[str, str], outside: dict[str, str]
) -> None:
    """Also what the run wrote is there, when its pods and all that this machine knew of it are gone."""
    settings = json.loads(person.job(TRAINING).read_text())["kubernetes"]
    run = start(
        program=TRAINING, snapshots={"to": "s3://digits/training"},
        kubernetes={**settings, "env_from": [{"secret": "store"}]},
    )  # fmt: skip
    first = run.wait("committed")
    lost = run.pods("worker")[0]["metadata"]["name"]
    captain = run.pods("captain")[0]["metadata"]["name"]
    person.cluster.kubectl("delete", "pod", lost, captain, "-n", person.namespace, "--grace-period=1")
    run.wait("committed", generation=2)
    assert restored(run) >= first["step"]
    run.wait("committed", count=3)
    person.finish()
    assert run.ends() == 0, run.said()
    kept = list((person.shared / "objects" / "digits" / "training" / run.name).glob("step-*/manifest.json"))
    assert len(kept) == 3
    assert bucket["AWS_SECRET_ACCESS_KEY"] not in (run.folder / "events.jsonl").read_text() + run.said()
    last = run.events("committed")[-1]["step"]
    again = start(
        program=TRAINING, snapshots={"from": run.name}, kubernetes={**settings, "env_from": [{"secret": "store"}]}
    )
    assert again.ends() == 0, again.said()
    assert (restored(again), begun(again, "worker-2")) == (last, [last])

    heard = {task: lines(run.folder, task) for task in ("worker-0", "worker-1", "worker-2")}
    report, person.env = run.report(), {**person.env, **outside}
    person.cluster.kubectl("delete", "jobs", "-n", person.namespace, "-l", f"paceline.dev/run={run.name}")
    for path in ("events.jsonl", "report.json", "whole", *(f"logs/{task}.log" for task in heard)):
        (run.folder / path).unlink()
    outcome = "succeeded", report["generations"], report["steps"]
    assert stands(person, run.name) == outcome
    found = printed(person, run.name)
    assert {**found, "worker-0": []} == {**heard, "worker-0": []}  # it was deleted, with what it had not sent yet
    assert [line for line in heard["worker-0"] if line in found["worker-0"]] == found["worker-0"] != []
    deleted = person.call("delete", "--yes", run.name)
    where = f"s3://digits/training/{run.name}"
    assert f"its snapshots and logs stay at {where}" in deleted.stderr
    assert (stands(person, where), printed(person, where)) == (outcome, found)


def test_a_bucket_that_cannot_be_used_ends_the_run_before_any_task_starts(
    person: Person, start: Callable[..., Run], bucket: dict[str, str]
) -> None:
    settings = json.loads(person.job(TRAINING).read_text())["kubernetes"]
    run = start(
        program=TRAINING, snapshots={"to": "s3://letters/training"},
        kubernetes={**settings, "env_from": [{"secret": "store"}]},
    )  # fmt: skip
    assert run.ends() == 1, run.said()
    report = run.report()
    assert (report["status"], report["cause"], report["generations"]) == ("failed", "store", 0)
    assert "there is no such bucket" in report["reason"] and "s3://letters/training" in report["reason"]
    assert run.events("task-started") == []


def test_a_claim_is_made_on_request_and_stays(person: Person, start: Callable[..., Run]) -> None:
    """Nothing provisions volumes in this cluster: there is one of that class already."""
    folder = person.shared / "fresh"
    folder.mkdir()
    folder.chmod(0o777)
    volume, _ = objects.volume(person.namespace, "fresh", folder, "1Gi", person.cluster.nodes[0])
    volume["spec"]["storageClassName"] = "none"
    person.cluster.apply(volume)
    made = {"size": "1Gi", "storage_class": "none"}
    run = start(program=TRAINING, workers=1, snapshots={"to": "claim://fresh", "claim": made})
    run.wait("committed")
    found = person.cluster.get("pvc", "fresh", "-n", person.namespace)
    assert found["spec"]["resources"]["requests"]["storage"] == str(2**30)
    assert (found["spec"]["accessModes"], found["spec"]["storageClassName"]) == (["ReadWriteOnce"], "none")
    assert "ownerReferences" not in found["metadata"]
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130, run.said()
    last = run.events("committed")[-1]["snapshot"]
    done = person.call("delete", "--yes", run.name)
    assert done.returncode == 0, done.stderr
    eventually("nothing is left", lambda: not person.cluster.get("jobs,pods", "-n", person.namespace)["items"])
    after = person.cluster.get("pvc", "fresh", "-n", person.namespace)
    assert (after["metadata"]["uid"], after["status"]["phase"]) == (found["metadata"]["uid"], "Bound")
    assert "deletionTimestamp" not in after["metadata"]
    assert json.loads((folder / run.name / last / "manifest.json").read_text())["parts"].keys() == {"worker-0"}
