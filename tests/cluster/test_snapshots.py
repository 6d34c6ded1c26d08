"""Snapshots of runs on a real cluster: in the captain's pod, in a volume claim and in a bucket; and after losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from support.lab import objects
from support.lab.cluster import LabError
from support.people import Person, Run, eventually, init_pid, lines
from support.saving_on_a_cluster import TRAINING, begun, restored

pytestmark = pytest.mark.timeout(900, func_only=True)

# Each of the first four waits until the one before is committed: none is skipped. No more follow until the test
# requests them, so that the snapshots it examines do not change.
IN_TURNS = TRAINING.replace("step % 10 == 0", "step % 10 == 0 and (step <= 40 or os.path.exists('/shared/more'))")
WAITS = "    while step in (10, 20, 30) and not os.path.exists(f'/shared/after-{step}'):\n        time.sleep(0.02)\n"
IN_TURNS = IN_TURNS.replace("    step += 1\n", f"{WAITS}    step += 1\n")


def commits_four(run: Run) -> None:
    for step in (10, 20, 30):
        run.wait("committed", step=step)
        (run.person.shared / f"after-{step}").touch()
    run.wait("committed", step=40)


def list_snapshots(person: Person, run: str) -> list[str]:
    """IDs of the snapshots at their location, newest first."""
    result = person.call("snapshots", "ls", run, "-o", "name")
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def read_snapshot(person: Person, run: str, snapshot: str) -> dict[str, str]:
    """The files of the snapshot: name -> content, from a copy."""
    folder = person.folder / f"copy-{uuid.uuid4().hex}"
    result = person.call("snapshots", "get", run, snapshot, "--to", str(folder))
    assert result.returncode == 0, result.stderr
    return {path.name: path.read_text() for path in folder.iterdir()}


def parts_of(step: int) -> dict[str, str]:
    return {**{f"part-{rank}": str(step) for rank in range(3)}, "paceline.json": json.dumps({"parts": 3})}


def call_without_exec(person: Person, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command by another user, who has the same rights except pods/exec."""
    kubeconfig = person.cluster.user("eve", person.namespace)
    role, _ = objects.rights("eve", person.namespace)
    allowed = [[each for each in rule["resources"] if each != "pods/exec"] for rule in role["rules"]]
    rules = [{**rule, "resources": resources} for rule, resources in zip(role["rules"], allowed, strict=True)]
    person.cluster.apply({**role, "rules": rules})

    def can_create(*right: str) -> bool:
        with suppress(LabError):  # the reply is no
            return bool(person.cluster.kubectl("auth", "can-i", "create", *right, kubeconfig=kubeconfig))
        return False

    eventually("the changed rights", lambda: can_create("jobs") and not can_create("pods", "--subresource=exec"))
    person.env["KUBECONFIG"], own_kubeconfig = str(kubeconfig), person.env["KUBECONFIG"]
    try:
        return person.call(*arguments)
    finally:
        person.env["KUBECONFIG"] = own_kubeconfig


def test_without_a_store_a_run_survives_the_loss_of_a_host_and_of_its_captain(
    person: Person, start: Callable[..., Run]
) -> None:
    run = start(program=IN_TURNS)
    commits_four(run)
    snapshots = [f"step-{step}-g1" for step in (40, 30, 20)]
    eventually("the first is deleted", lambda: list_snapshots(person, run.name) == snapshots, more=run.said)
    assert read_snapshot(person, run.name, "40") == parts_of(40)
    assert person.call("snapshots", "verify", run.name, "--all").returncode == 0
    assert person.call("snapshots", "rm", run.name, snapshots[-1], "--yes").returncode == 0
    assert list_snapshots(person, run.name) == snapshots[:2]
    refused = call_without_exec(person, "snapshots", "ls", run.name)
    assert refused.returncode == 1 and "pods/exec" in refused.stderr and len(refused.stderr.splitlines()) == 1
    (person.shared / "more").touch()
    first = run.wait("committed")
    lost_pod = run.pods("worker")[1]["metadata"]["name"]
    person.cluster.kubectl("delete", "pod", lost_pod, "-n", person.namespace, "--grace-period=1")
    run.wait("generation-formed", count=2)
    assert restored(run) >= first["step"]
    second = run.wait("committed", generation=2)
    captain = run.pods("captain")[0]["metadata"]["name"]
    person.cluster.kubectl("delete", "pod", captain, "-n", person.namespace, "--grace-period=1")
    run.wait("captain-returned")
    eventually("the snapshot is restored", lambda: "from copies on the hosts" in run.said(), more=run.said)
    run.wait("committed", count=len(run.events("committed")) + 2)
    pid = run.events("task-started", task="worker-2")[-1]["pid"]
    pod = run.pods("worker")[2]["metadata"]["name"]
    person.cluster.kubectl("exec", "-n", person.namespace, pod, "--", "/bin/sh", "-c", f"kill -9 {pid}")
    run.wait("generation-formed", count=3)
    assert restored(run) >= second["step"]
    eventually("all begin from that step", lambda: begun(run, "worker-0")[-1] == restored(run), more=run.said)
    person.finish()
    assert run.ends() == 0, run.said()


# Writes its own checkpoint to a file that the first worker overwrites in place; all workers resume from it.
CHECKPOINTING = """
import os, pathlib, time
rank, checkpoint = int(os.environ["PACELINE_RANK"]), pathlib.Path("ckpt/state")
step = 0
if checkpoint.exists():
    first, last = checkpoint.read_text().split()
    assert first == last, (first, last)
    step = int(first)
print("start", step, flush=True)
while not pathlib.Path("/shared/finish").exists():
    time.sleep(1.5)
    step += 1
    if rank == 0:
        checkpoint.parent.mkdir(exist_ok=True)
        with checkpoint.open("w", buffering=1) as file:
            print(step, file=file)
            time.sleep(0.3)
            print(step, file=file)
print("done", flush=True)
"""


def test_a_watched_folder_is_restored_on_pods_that_never_had_it(person: Person, start: Callable[..., Run]) -> None:
    run = start(program=CHECKPOINTING, snapshots={"watch": "ckpt/"})
    run.wait("committed", count=2)
    lost_pod = run.pods("worker")[0]["metadata"]["name"]
    person.cluster.kubectl("delete", "pod", lost_pod, "-n", person.namespace, "--grace-period=1")
    run.wait("generation-formed", count=2)
    tasks = [f"worker-{number}" for number in range(3)]
    eventually("all tasks resume", lambda: {len(begun(run, task)) for task in tasks} == {2}, more=run.said)
    [step] = {begun(run, task)[-1] for task in tasks}
    assert step >= 2 and restored(run) >= 2
    run.wait("committed", generation=2)
    person.finish()
    assert run.ends() == 0, run.said()
    assert "warning" not in run.said(), run.said()


def test_snapshots_in_a_claim_outlive_their_run_and_its_pods_and_other_runs_start_from_them(
    person: Person, start: Callable[..., Run]
) -> None:
    node = person.cluster.nodes[0]
    folder = person.cluster.local_volume(person.namespace, "kept", node)
    run = start(program=IN_TURNS, snapshots={"to": "claim://kept/of digits", "keep": 2})
    commits_four(run)
    assert [pod["spec"]["nodeName"] for pod in run.pods("captain")] == [node]
    newest, older = "step-40-g1", "step-30-g1"
    eventually("the others are deleted", lambda: list_snapshots(person, run.name) == [newest, older], more=run.said)
    details = json.loads(person.call("snapshots", "show", run.name, "-o", "json").stdout)
    assert (details["snapshot"], details["place"]) == (newest, f"claim://kept/of digits/{run.name}/step-40-g1")
    assert [part["task"] for part in details["parts"]] == [f"worker-{n}" for n in (0, 0, 1, 1, 2, 2)]
    assert read_snapshot(person, run.name, newest) == parts_of(40)
    (folder / "of digits" / run.name / older / "worker-1" / "part-1").write_text("41")
    result = person.call("snapshots", "verify", run.name, "--all")
    assert result.returncode == 1 and f"{older}/worker-1/part-1 is damaged: its SHA-256 differs" in result.stdout
    assert f"{newest} is intact: 6 files" in result.stdout
    result = person.call("snapshots", "rm", run.name, newest, "--yes")
    assert result.returncode == 1 and "is running and would resume from it" in result.stderr
    result = person.call("snapshots", "rm", f"claim://kept/of digits/{run.name}", older, "--yes")
    assert (result.returncode, result.stderr) == (0, f"deleted {older}\n")
    assert not (folder / "of digits" / run.name / older).exists() and list_snapshots(person, run.name) == [newest]
    captain = run.pods("captain")[0]["metadata"]["name"]
    list_commands = ("exec", "-n", person.namespace, captain, "--", "/bin/sh", "-c", "cat /proc/[0-9]*/cmdline || true")
    eventually("the commands in the pod have ended", lambda: "tempfile" not in person.cluster.kubectl(*list_commands))
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
    assert read_snapshot(person, run.name, str(last)) == parts_of(last)
    result = person.call("delete", "--yes", run.name)
    assert result.returncode == 0 and f"`paceline delete --snapshots {run.name}` deletes them" in result.stderr
    manifests: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in (folder / "of digits" / run.name).glob("step-*/manifest.json")
    ]
    assert len(manifests) == 2 and max(each["step"] for each in manifests) == last
    assert all(set(each["parts"]) == {"worker-0", "worker-1", "worker-2"} for each in manifests)
    location = f"claim://kept/of digits/{run.name}"
    assert output_of(person, location)["worker-2"][-1] == "done"
    snapshot_location = f"{location}/{list_snapshots(person, run.name)[0]}"
    assert snapshot_location.startswith(f"{location}/step-{last}-g")
    alone = "import os; print('start', open(os.environ['PACELINE_RESTORE'] + '/part-2').read())"
    by_id = start(program=alone, workers=1, snapshots={"from": run.name})
    by_location = start(program=alone, workers=1, snapshots={"from": snapshot_location, "to": "claim://kept/next"})
    for other, origin in ((by_id, location), (by_location, snapshot_location)):
        assert other.ends() == 0, other.said()
        assert [each["origin"] for each in other.events("committed")] == [snapshot_location]
        assert (restored(other), begun(other, "worker-0")) == (last, [last])
        assert f"from         {origin}\n" in person.call("status", other.name).stdout
    copy = folder / "next" / by_location.name / f"step-{last}-g0"
    assert json.loads((copy / "manifest.json").read_text())["origin"] == snapshot_location
    assert person.call("delete", "--yes", by_id.name, by_location.name).returncode == 0
    result = person.call("delete", "--snapshots", "--yes", run.name)
    assert (result.returncode, result.stderr.splitlines()[-1]) == (0, f"deleted the snapshots of {run.name}"), (
        result.stderr
    )
    assert list((folder / "of digits").iterdir()) == []
    assert person.call("snapshots", "ls", run.name).returncode == 2
    eventually("nothing remains", lambda: not person.cluster.get("jobs,pods", "-n", person.namespace)["items"])


def output_of(person: Person, source: str) -> dict[str, list[str]]:
    """The output of each task, as `paceline logs` prints it."""
    result = person.call("logs", source, "-o", "json")
    assert result.returncode == 0 and not result.stderr, result.stderr
    output: dict[str, list[str]] = {}
    for line in map(json.loads, result.stdout.splitlines()):
        output.setdefault(line["task"], []).append(line["text"])
    return output


def outcome_of(person: Person, source: str) -> tuple[str, int, int]:
    result = person.call("status", source, "-o", "json")
    assert result.returncode == 0 and not result.stderr, result.stderr
    status = json.loads(result.stdout)
    return status["status"], status["generations"], status["steps"]


def test_snapshots_in_a_bucket_with_an_image_without_support_for_buckets(
    person: Person, start: Callable[..., Run], bucket: dict[str, str], outside: dict[str, str]
) -> None:
    """The run's output is in the bucket, too, when its pods and its files on this machine are deleted."""
    settings = json.loads(person.job(TRAINING).read_text())["kubernetes"]
    run = start(
        program=TRAINING, snapshots={"to": "s3://digits/training"},
        kubernetes={**settings, "env_from": [{"secret": "store"}]},
    )  # fmt: skip
    first = run.wait("committed")
    lost_pod = run.pods("worker")[0]["metadata"]["name"]
    captain = run.pods("captain")[0]["metadata"]["name"]
    person.cluster.kubectl("delete", "pod", lost_pod, captain, "-n", person.namespace, "--grace-period=1")
    run.wait("committed", generation=2)
    assert restored(run) >= first["step"]
    run.wait("committed", count=3)
    person.finish()
    assert run.ends() == 0, run.said()
    manifests = list((person.shared / "objects" / "digits" / "training" / run.name).glob("step-*/manifest.json"))
    assert len(manifests) == 3
    assert bucket["AWS_SECRET_ACCESS_KEY"] not in (run.folder / "events.jsonl").read_text() + run.said()
    last = run.events("committed")[-1]["step"]
    again = start(
        program=TRAINING, snapshots={"from": run.name}, kubernetes={**settings, "env_from": [{"secret": "store"}]}
    )
    assert again.ends() == 0, again.said()
    assert (restored(again), begun(again, "worker-2")) == (last, [last])

    output = {task: lines(run.folder, task) for task in ("worker-0", "worker-1", "worker-2")}
    report, person.env = run.report(), {**person.env, **outside}
    person.cluster.kubectl("delete", "jobs", "-n", person.namespace, "-l", f"paceline.dev/run={run.name}")
    for path in ("events.jsonl", "report.json", "whole", *(f"logs/{task}.log" for task in output)):
        (run.folder / path).unlink()
    outcome = "succeeded", report["generations"], report["steps"]
    assert outcome_of(person, run.name) == outcome
    stored_output = output_of(person, run.name)
    # The pod of worker-0 was deleted, with output that it had not sent yet.
    assert {**stored_output, "worker-0": []} == {**output, "worker-0": []}
    assert [line for line in output["worker-0"] if line in stored_output["worker-0"]] == stored_output["worker-0"] != []
    deleted = person.call("delete", "--yes", run.name)
    location = f"s3://digits/training/{run.name}"
    assert f"its snapshots and logs are kept at {location}" in deleted.stderr
    assert (outcome_of(person, location), output_of(person, location)) == (outcome, stored_output)


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
    assert "the bucket does not exist" in report["reason"] and "s3://letters/training" in report["reason"]
    assert run.events("task-started") == []


def test_a_claim_is_created_on_request_and_kept(person: Person, start: Callable[..., Run]) -> None:
    """Nothing provisions volumes in this cluster: the test creates a volume of that class in advance."""
    folder = person.shared / "fresh"
    folder.mkdir()
    folder.chmod(0o777)
    volume, _ = objects.volume(person.namespace, "fresh", folder, "1Gi", person.cluster.nodes[0])
    volume["spec"]["storageClassName"] = "none"
    person.cluster.apply(volume)
    claim_settings = {"size": "1Gi", "storage_class": "none"}
    run = start(program=TRAINING, workers=1, snapshots={"to": "claim://fresh", "claim": claim_settings})
    run.wait("committed")
    claim = person.cluster.get("pvc", "fresh", "-n", person.namespace)
    assert claim["spec"]["resources"]["requests"]["storage"] == str(2**30)
    assert (claim["spec"]["accessModes"], claim["spec"]["storageClassName"]) == (["ReadWriteOnce"], "none")
    assert "ownerReferences" not in claim["metadata"]
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130, run.said()
    last = run.events("committed")[-1]["snapshot"]
    result = person.call("delete", "--yes", run.name)
    assert result.returncode == 0, result.stderr
    eventually("nothing remains", lambda: not person.cluster.get("jobs,pods", "-n", person.namespace)["items"])
    after = person.cluster.get("pvc", "fresh", "-n", person.namespace)
    assert (after["metadata"]["uid"], after["status"]["phase"]) == (claim["metadata"]["uid"], "Bound")
    assert "deletionTimestamp" not in after["metadata"]
    assert json.loads((folder / run.name / last / "manifest.json").read_text())["parts"].keys() == {"worker-0"}


# Saves 6 MiB when a file requests it, and kills itself when another one does.
SAVING_TO_MEMORY = """
import os, signal, time
import paceline
from paceline.runtime.snapshot_folders import restored, save_snapshot
step = int((restored() / "step").read_text()) if restored() else 0
print("start", step, os.path.realpath(restored() or "/"), flush=True)
def write(folder):
    (folder / "step").write_text(str(step))
    (folder / "state").write_bytes(bytes(6 << 20))
while not os.path.exists("/shared/finish"):
    time.sleep(0.05)
    if os.path.exists(f"/shared/kill-{os.environ['PACELINE_GENERATION']}"):
        os.kill(os.getpid(), signal.SIGKILL)
    if os.path.exists(f"/shared/save-{step + 10}"):
        step += 10
        save_snapshot(write, step)
    paceline.report(step=step)
"""


def test_snapshots_in_memory_survive_tasks_and_containers_and_a_full_memory(
    person: Person, start: Callable[..., Run]
) -> None:
    run = start(
        program=SAVING_TO_MEMORY, workers=1, memory="128Mi", snapshots={"memory": "16Mi", "commit_every": "1h"}
    )  # fmt: skip

    def save(step: int) -> None:
        (person.shared / f"save-{step}").touch()
        run.wait("saved", step=step)

    save(10)
    [pod] = run.pods("worker")
    volume = {"name": "paceline-memory", "emptyDir": {"medium": "Memory", "sizeLimit": str(16 << 20)}}
    assert volume in pod["spec"]["volumes"]
    assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == str(144 << 20)
    (person.shared / "kill-1").touch()
    run.wait("step", generation=2)
    os.kill(init_pid(pod), signal.SIGKILL)
    run.wait("step", generation=3)
    save(20)
    save(30)
    text = "snapshots.memory: no room for the snapshot of step 30 of worker-0: written to disk"
    run.wait("note", text=text)
    person.finish()
    assert run.ends() == 0, run.said()
    in_memory = "start 10 /paceline/memory/restored/worker-host-0/step-10-g1"
    assert [line for line in lines(run.folder, "worker-0") if "start" in line] == ["start 0 /", in_memory, in_memory]
    assert [each["step"] for each in run.events("committed")] == [10, 30]
    assert [each["cause"] for each in run.report()["restarts"]] == ["signal", "host-lost"]
    [pod] = run.pods("worker")
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 1
