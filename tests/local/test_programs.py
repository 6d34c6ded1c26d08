"""Programs that users already have run unchanged, with the frameworks they are written for, and behave correctly."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from support.ports import free_port
from support.runs import PROGRAMS, Report, Run, Starter, kill, processes

pytestmark = pytest.mark.timeout(400)

LIMIT_S = 180.0  # for a framework to start twice, while another runs
DIGITS = Path(__file__).parents[2] / "examples" / "digits"
LINE = re.compile(r"^\S+Z g\d+ [|~] (.*)$")
UNEQUAL = [{"replicas": 1, "tasks_per_host": 1}, {"replicas": 1, "tasks_per_host": 2}]


def job(framework: str, *command: object, **overrides: Any) -> dict[str, Any]:
    """Two workers that run a program of this folder, started cold; `overrides` replace these fields."""
    fields: dict[str, Any] = {"name": "program", "framework": framework, "code": str(PROGRAMS)}
    if command:
        fields["command"] = [str(word) for word in command]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    return {**fields, "env": quiet, "roles": {"worker": {"replicas": 2}}, "restart": {"warm": False}, **overrides}


def lines(folder: Path, task: str) -> list[str]:
    """The lines that the task printed, in all generations."""
    log_lines = (folder / "logs" / f"{task}.log").read_text().split("\n")[:-1]
    matches = [LINE.match(line) for line in log_lines]
    assert all(matches), f"not in the form of a log line: {log_lines[matches.index(None)]!r}"
    return [line[1] for line in matches if line]


def epochs(folder: Path, task: str) -> list[str]:
    """What torch_tutorial.py printed. Torch may add warnings if another rank exits slightly earlier."""
    has_output = (folder / "logs" / f"{task}.log").exists()
    return [line for line in lines(folder, task) if line.startswith("epoch ")] if has_output else []


def printed_value(folder: Path, task: str, label: str) -> str:
    """The text after this label in the last line of the task that begins with it."""
    values = [line[len(label) + 1 :] for line in lines(folder, task) if line.startswith(f"{label} ")]
    assert values, f"{task} printed no line with {label!r}:\n" + "\n".join(lines(folder, task)[-20:])
    return values[-1]


def common_digest(folder: Path, *tasks: str) -> str:
    """The digest of the weights, which all these tasks must have printed."""
    digests = {printed_value(folder, task, "weights") for task in tasks}
    assert len(digests) == 1, f"the tasks do not agree on the weights: {digests}"
    return digests.pop()


def variables(folder: Path, task: str) -> dict[str, str]:
    environment: dict[str, str] = json.loads(printed_value(folder, task, "environment"))["variables"]
    return environment


@pytest.mark.parametrize("command", [["python"], ["python", "-I"]], ids=["hook", "no hook"])
def test_tensorflow_workers_send_only_large_initial_values_that_differ(start: Starter, command: list[str]) -> None:
    run = start(job("tensorflow", *command, "tf_initial_values.py", strategy="multi-worker"))
    run.succeeds(LIMIT_S)
    common_digest(run.folder, "worker-0", "worker-1")
    equal = "" if command == ["python"] else "zeros, seeded, integers, "
    for task in ("worker-0", "worker-1"):
        assert printed_value(run.folder, task, "sent") == f"{equal}own, one differs, drawn, small"


@pytest.mark.long
def test_a_torch_program_needs_no_job_file_and_a_kill_does_not_change_its_weights(
    start: Starter, tmp_path: Path
) -> None:
    program = ["python", str(PROGRAMS / "torch_ddp.py"), "--steps", "12", "--checkpoint-dir"]
    fault = ["--fail-at", 6, "--fail-how", "SIGKILL", "--fail-once", tmp_path / "failed"]
    killed = start(job("torch", *program, tmp_path / "killed", *fault))
    report = killed.succeeds(LIMIT_S)
    assert report["generations"] == 2
    assert [(restart["cause"], restart["task"]) for restart in report["restarts"]] == [("signal", "worker-1")]
    assert [line for line in lines(killed.folder, "worker-0") if line.startswith("start ")] == ["start 0", "start 5"]

    shape = ["--framework", "torch", "--workers", "2", "--save", "saved.yaml", "--set", "restart.warm=false"]
    undisturbed = run_to_success(killed, "run", *shape, "-o", "json", "--", *program, str(tmp_path / "whole"))
    assert common_digest(undisturbed, "worker-0", "worker-1") == common_digest(killed.folder, "worker-0", "worker-1")
    assert printed_value(undisturbed, "worker-0", "rank") == "0 of 2, local rank 0, gloo"
    assert printed_value(undisturbed, "worker-1", "rank") == "1 of 2, local rank 1, gloo"

    repeated = run_to_success(
        killed, "run", "saved.yaml", "-o", "json", "--set", "command=[python, -c, 'print(\"again 2\")']"
    )
    assert [printed_value(repeated, task, "again") for task in ("worker-0", "worker-1")] == ["2", "2"]


def run_to_success(run: Run, *arguments: str) -> Path:
    """The folder of another run in the home of this one, which must succeed and leave no process."""
    result = run.call(*arguments, limit=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert not processes(run.home)
    report: Report = json.loads(result.stdout)
    assert report["status"] == "succeeded"
    return Path(report["folder"])


def test_unequal_hosts_are_used_in_full_by_equal_tasks(start: Starter) -> None:
    run = start(job("torch", "python", "torch_ddp.py", "--steps", 5, roles={"worker": UNEQUAL}))
    run.succeeds(LIMIT_S)
    tasks = ("worker-0", "worker-1", "worker-2")
    common_digest(run.folder, *tasks)
    ranks = [f"{rank} of 3, local rank {rank}, gloo" for rank in range(3)]
    assert [printed_value(run.folder, task, "rank") for task in tasks] == ranks


def test_jax_finds_its_peers_without_arguments(start: Starter) -> None:
    run = start(job("jax", "python", "jax_allreduce.py", "--steps", 60))
    run.succeeds(LIMIT_S)
    assert run.events("warning") == []  # they did communicate
    common_digest(run.folder, "worker-0", "worker-1")
    assert printed_value(run.folder, "worker-0", "rank") == "0 of 2, 2 devices"
    assert printed_value(run.folder, "worker-1", "rank") == "1 of 2, 2 devices"
    assert float(printed_value(run.folder, "worker-0", "error")) < 0.001


@pytest.mark.parametrize("command", [["python", "plain.py"], ["./plain.sh"], ["sh", "plain.sh"]], ids=" ".join)
def test_any_program_runs_and_learns_which_task_it_is(start: Starter, command: list[str]) -> None:
    run = start(job("none", *command))
    run.succeeds()
    for task in ("worker-0", "worker-1"):
        assert lines(run.folder, task) == [f"pod {task}", f"task {task}"]


def test_the_report_has_all_its_fields(start: Starter) -> None:
    run = start(job("none", "python", "misbehave.py", "--report", "--steps", 5))
    report = run.succeeds()
    assert report == {"schema_version": 1, **json.loads((run.folder / "report.json").read_text())}
    assert set(report) == {
        "schema_version", "run", "status", "reason", "cause", "generations", "restarts", "steps", "steps_per_s",
        "metrics", "started", "ended", "folder", "stacks", "skipped", "best", "starts", "goodput", "resources",
    }  # fmt: skip
    assert report["folder"] == str(run.folder) == str(run.home / "runs" / report["run"])
    assert (report["cause"], report["generations"], report["restarts"], report["stacks"]) == (None, 1, [], {})
    assert report["steps"] == 5
    assert report["steps_per_s"] > 0
    assert report["metrics"] == {task: {"loss": 0.2} for task in ("worker-0", "worker-1")}
    assert report["started"] < report["ended"]


def test_tf_config_is_json_and_the_evaluator_is_not_in_the_cluster(start: Starter) -> None:
    roles = {"worker": {"replicas": 2}, "evaluator": {"replicas": 1, "env": {"FOR_ONE": "evaluator"}}}
    env = {"FOR_ALL": "all", "FOR_ONE": "all"}
    command = ["python", "environment.py", "two words", "1"]
    run = start(job("tensorflow", *command, strategy="multi-worker", roles=roles, env=env))
    run.succeeds()
    environments = {task: variables(run.folder, task) for task in ("worker-0", "worker-1", "evaluator-0")}
    configs = [json.loads(environment["TF_CONFIG"]) for environment in environments.values()]
    cluster = configs[0]["cluster"]
    assert list(cluster) == ["worker"]
    assert len(set(cluster["worker"])) == 2
    assert all(config["cluster"] == cluster for config in configs)
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
        {"type": "evaluator", "index": 0},
    ]
    for task, environment in environments.items():
        assert environment["POD_NAME"] == environment["PACELINE_TASK"] == task
        assert json.loads(environment["CLUSTER_CONFIG"]) == cluster
        assert (environment["FOR_ALL"], environment["FOR_ONE"]) == (
            "all",
            "evaluator" if task == "evaluator-0" else "all",
        )
        assert (environment["PACELINE_RUN"], environment["PACELINE_GENERATION"], environment["PACELINE_RESTORE"]) == (
            run.folder.name,
            "1",
            "",
        )
        assert Path(environment["PACELINE_SNAPSHOT_DIR"]) == run.folder / "staging" / task / "g1"
        assert ("PACELINE_COMMITTED_DIR" in environment) == (task == "evaluator-0")
        assert Path(environment["PACELINE_TENSORBOARD_DIR"]) == run.folder / "tensorboard"
        assert int(environment["OMP_NUM_THREADS"]) >= 1
        assert environment["PYTHONUNBUFFERED"] == "1"
    printed = json.loads(printed_value(run.folder, "worker-0", "environment"))
    assert (printed["arguments"], printed["folder"]) == (["two words", "1"], str(PROGRAMS))


def test_a_torch_task_gets_the_variables_that_torchrun_sets(start: Starter, tmp_path: Path) -> None:
    run = start(job("torch", "python", "environment.py", roles={"worker": UNEQUAL}))
    run.succeeds()
    environments = [variables(run.folder, f"worker-{index}") for index in range(3)]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
    assert [[environment[name] for name in names] for environment in environments] == [
        ["0", "3", "0", "3", "0", "1", "0"],
        ["1", "3", "1", "3", "0", "1", "1"],
        ["2", "3", "2", "3", "0", "1", "2"],
    ]
    assert len({(environment["MASTER_ADDR"], environment["MASTER_PORT"]) for environment in environments}) == 1

    torchrun = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1",
            "--master-port", str(free_port()),  # 29500 may be in use
            str(PROGRAMS / "environment.py"),
        ],
        env={**run.env, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True, timeout=180,
    )  # fmt: skip
    line = next(line for line in torchrun.stdout.splitlines() if line.startswith("environment "))
    expected = set(json.loads(line.removeprefix("environment "))["variables"]) - {*run.env, "TMPDIR"}
    assert set(names) < expected
    # torchrun uses these two to communicate with its children: where to write an error, which signals to expect.
    expected -= {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    for environment in environments:
        assert expected - set(environment) == set()


def test_one_worker_of_a_machine_has_local_rank_0_and_writes_the_snapshot(start: Starter, tmp_path: Path) -> None:
    run = start(job("torch", "python", "torch_tutorial.py", tmp_path / "snapshot.pt"))
    run.succeeds(LIMIT_S)
    assert epochs(run.folder, "worker-0") == ["epoch 0 saved by rank 0 of 2", "epoch 1 saved by rank 0 of 2"]
    assert epochs(run.folder, "worker-1") == []
    assert (tmp_path / "snapshot.pt").exists()
    assert run.events("warning") == []  # they did communicate
    measured = {event["task"]: event for event in run.events("start-times")}
    for task in ("worker-0", "worker-1"):  # it reports no steps, and restores its state itself
        times = {name: value for name, value in measured[task].items() if name.endswith("_s")}
        assert list(times) == ["imports_s", "joining_s", "joined_s"] and list(times.values()) == sorted(times.values())


def test_torchrun_as_the_command_forms_one_world_over_all_hosts(start: Starter, tmp_path: Path) -> None:
    """Also where torchrun is not on PATH, but beside the interpreter that `python` stands for."""
    path = ":".join(folder for folder in os.environ["PATH"].split(":") if not Path(folder, "torchrun").exists())
    command = ["torchrun", "torch_tutorial.py", tmp_path / "snapshot.pt"]
    run = start(job("torch", *command), env={"PATH": path, "VIRTUAL_ENV": sys.prefix})
    run.succeeds(LIMIT_S)
    assert "torchrun is not needed" in run.said()
    assert epochs(run.folder, "worker-0") == ["epoch 0 saved by rank 0 of 2", "epoch 1 saved by rank 0 of 2"]
    assert epochs(run.folder, "worker-1") == ["epoch 0 saved by rank 1 of 2", "epoch 1 saved by rank 1 of 2"]
    assert run.events("warning") == []
    assert run.events("start-times") == []  # of the processes that torchrun starts, nothing is known


def test_workers_that_succeed_without_communicating_are_warned_about(start: Starter) -> None:
    # Long enough for the agent to be sure that no process listened in between.
    run = start(job("torch", "python", "-c", "import time; time.sleep(4.5)"))
    run.succeeds()
    [warning] = run.events("warning")
    expected = "2 workers succeeded and probably never communicated with each other: no process used "
    assert warning["text"].startswith(expected)
    assert "torch.distributed.init_process_group()" in warning["text"]


@pytest.mark.long
def test_the_demo_reads_digits_even_when_a_worker_is_killed(start: Starter) -> None:
    digits = YAML(typ="safe").load(DIGITS / "job.yaml")
    run = start({**digits, "code": str(DIGITS), "command": [*digits["command"], "--steps", "400", "--every", "40"]})
    run.wait("committed", LIMIT_S)
    kill(run.task("worker-1"))
    report = run.succeeds(LIMIT_S)
    assert [(restart["cause"], restart["task"]) for restart in report["restarts"]] == [("signal", "worker-1")]
    restored = [event["restore"] for event in run.events("generation-formed")]
    assert restored[0] is None
    steps = [event["step"] for event in run.events("step") if event["generation"] == 2 and event["task"] == "worker-0"]
    # The very first steps may be reported together; what the program prints every 40 steps shows that none is missing.
    restored_step = int(restored[1].split("-")[1])
    assert restored[1].endswith("-g1") and restored_step < steps[0] <= restored_step + 40
    assert re.findall(r" g2 \| step (\d+) of 400", run.log("worker-0"))[0] == str(restored_step + 40)
    assert report["steps"] == 400
    assert report["metrics"]["evaluator-0"]["accuracy"] >= 0.95
    assert report["metrics"]["worker-0"] == report["metrics"]["worker-1"]
    committed = [event["snapshot"] for event in run.events("committed")]
    assert committed[-1].startswith("step-400-")
    assert {path.name for path in (run.folder / "snapshots" / run.folder.name).glob("step-*")} == {*committed[-3:]}
    assert not [name for name in ("staging", "held", "restored", "committed") if (run.folder / name).exists()]
    for writer in ("train", "evaluator-0"):
        assert list((run.folder / "tensorboard" / writer).glob("events.out.tfevents.*"))
