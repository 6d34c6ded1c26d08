"""`paceline run` and the verbs around it, with real processes, through pipes."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import psutil
import pytest

from support import person
from support.person import DEAF, SHORT, STEADY, Person, a_moment_later, eventually

EVENTS = json.loads((Path(__file__).parents[2] / "docs" / "events.schema.json").read_text())


@pytest.fixture
def me(tmp_path: Path) -> Iterator[Person]:
    user = Person(tmp_path)
    with person.nothing_left(user.home):
        yield user


def test_a_run_that_succeeds(me: Person) -> None:
    me.job(SHORT, workers=2)
    result = me.call("run")
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    lines = result.stderr.splitlines()
    assert "* starting worker-0 and worker-1 (generation 1)" in lines
    for task in ("worker-0", "worker-1"):
        assert [line for line in lines if line.startswith(f"{task} |")] == [f"{task} | step {i}" for i in range(1, 6)]
    run = me.run_folder().name
    assert f"{run} succeeded after" in result.stderr and "5 steps" in result.stderr and "no restarts" in result.stderr
    assert lines[-1].split() == ["next", "paceline", "status", run]
    assert "\x1b" not in result.stderr


def test_the_report_as_json_and_nothing_else(me: Person) -> None:
    me.job(SHORT)
    result = me.call("run", "job.yaml", "-o", "json")
    report = json.loads(result.stdout)
    assert (result.returncode, report["status"], report["steps"], report["restarts"]) == (0, "succeeded", 5, [])
    assert set(report) >= {"run", "status", "reason", "generations", "restarts", "steps", "started", "ended", "folder"}
    assert json.loads(me.call("ls", "-o", "json").stdout) == [report]
    status = json.loads(me.call("status", "-o", "json").stdout)
    assert {key: status[key] for key in report} == report


def test_every_event_of_a_run_fits_the_schema(me: Person) -> None:
    me.job(SHORT + "import os\nos._exit(int(os.environ['PACELINE_GENERATION'] == '1'))\n", workers=2)
    me.call("run")
    lines = (me.run_folder() / "events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["event"] for line in lines]
    assert {"run-started", "generation-formed", "task-started", "task-exited", "restart", "run-ended"} <= set(kinds)
    for line in lines:
        jsonschema.Draft202012Validator(EVENTS).validate(json.loads(line))


def test_start_up_messages_of_frameworks_are_in_the_log_and_shown_on_request(me: Person) -> None:
    noise = "I0000 00:00:1794906827.444774   11692 port.cc:153] oneDNN custom operations are on."
    me.job(f"print({noise!r}); print('step 1')")
    quiet, verbose = me.call("run", "--run", "quiet"), me.call("run", "--run", "loud", "--verbose")
    assert "worker-0 | step 1" in quiet.stderr and noise not in quiet.stderr
    assert f"worker-0 | {noise}" in verbose.stderr
    assert f"worker-0 | {noise}" in me.call("logs", "quiet").stdout


def test_a_program_that_fails(me: Person) -> None:
    me.job("raise ValueError('no such digit')")
    result = me.call("run", "-o", "json")
    report = json.loads(result.stdout)
    assert (result.returncode, report["status"], report["cause"]) == (1, "failed", "program-error")
    assert "no such digit" in report["reason"]
    assert f"paceline logs {report['run']} --task worker-0" in result.stderr


def test_a_command_without_a_file(me: Person) -> None:
    (me.folder / "train.py").write_text("import sys; print(sys.argv[1:])")
    result = me.call(
        "run", "--workers", "2", "--save", "saved.yaml", "--", "python", "train.py", "--workers", "--", "-o"
    )
    assert result.returncode == 0, result.stderr
    assert "worker-1 | ['--workers', '--', '-o']" in result.stderr
    assert "wrote saved.yaml; to run it again: paceline run saved.yaml" in result.stderr
    assert me.call("validate", "saved.yaml").stdout == "saved.yaml is valid: 2 workers\n"
    assert me.call("run", "saved.yaml").returncode == 0


def test_an_existing_file_is_not_overwritten(me: Person) -> None:
    me.job(SHORT)
    result = me.call("run", "--save", "job.yaml", "--", "true")
    assert (result.returncode, result.stderr) == (
        2,
        "error: job.yaml already exists; delete it, or use another file name\n",
    )
    assert not (me.home / "runs").exists()


def test_a_dry_run_prints_the_plan_and_starts_nothing(me: Person) -> None:
    me.job(SHORT)
    overrides = ("--set", "roles.worker.replicas=3")
    dry = me.call("run", "job.yaml", "--dry-run", *overrides)
    assert dry.returncode == 0 and dry.stdout == me.call("plan", "job.yaml", *overrides).stdout
    assert dry.stdout.count("worker-host-2") == 2
    as_json = me.call("run", "--dry-run", "-o", "json", *overrides)
    assert json.loads(as_json.stdout) == json.loads(me.call("plan", *overrides, "-o", "json").stdout)
    assert list(me.home.iterdir()) == []


def test_overrides_and_a_name(me: Person) -> None:
    me.job(SHORT)
    result = me.call("run", "--set", "roles.worker.replicas=2", "--name", "other", "-o", "json")
    assert json.loads(result.stdout)["run"].startswith("other-")
    assert "worker-1 | step 5" in result.stderr


def test_a_job_that_cannot_run_here_is_rejected_before_anything_starts(me: Person) -> None:
    me.job(SHORT)
    result = me.call("run", "--set", "roles.worker.gpus=999")
    assert result.returncode == 2 and result.stderr.startswith("error: ") and "GPU" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_stops_the_run_with_grace(me: Person, number: signal.Signals) -> None:
    me.job(STEADY)
    started = me.start("run", "-o", "json")
    started.wait_for(r"worker-0 \| step 3\n")
    os.kill(started.process.pid, number)
    code, out = started.end()
    report = json.loads(out)
    assert (code, report["status"], report["reason"]) == (130, "stopped", "interrupted")
    assert "stopping: tasks have 30 s to finish; press Ctrl-C again to kill them\n" in started.said
    assert "worker-0 | asked to end\n" in started.said


def test_a_signal_right_at_the_start_stops_it_too(me: Person) -> None:
    me.job(STEADY)
    started = me.start("run")
    eventually(lambda: list(me.home.glob("runs/*/run.json")), "a run")
    os.kill(started.process.pid, signal.SIGINT)
    assert started.end()[0] == 130


def test_a_second_signal_kills_tasks_that_ignore_the_first(me: Person) -> None:
    me.job(DEAF, more="limits: {grace: 1h}\n")
    started = me.start("run", "-o", "json")
    started.wait_for("step 3\n")
    os.kill(started.process.pid, signal.SIGINT)
    started.wait_for("stopping: tasks have 1 h to finish")
    a_moment_later(time.monotonic())
    os.kill(started.process.pid, signal.SIGINT)
    code, out = started.end()
    assert code == 130 and "killing all tasks\n" in started.said
    assert json.loads(out)["status"] in ("stopped", "failed")


def test_tasks_that_ignore_the_signal_are_killed_after_the_grace(me: Person) -> None:
    me.job(DEAF, more="limits: {grace: 1s}\n")
    started = me.start("run")
    started.wait_for("step 3\n")
    os.kill(started.process.pid, signal.SIGTERM)
    assert started.end()[0] == 130
    assert "stopping: tasks have 1 s to finish; press Ctrl-C again to kill them\n" in started.said


def test_a_run_stops_if_its_output_is_no_longer_read(me: Person) -> None:
    me.job(STEADY)
    started = me.start("run")
    started.wait_for("step 3\n")
    started.stop_reading()
    assert started.process.wait(person.LIMIT_S) == 130
    assert json.loads((me.run_folder() / "report.json").read_text())["reason"] == "the terminal was closed"


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])  # with C, some of the output is written immediately
@pytest.mark.parametrize("arguments", [("ls", "-o", "json"), ("schema",), ("--help",)])
def test_output_that_cannot_be_written_is_an_error_in_one_line(
    me: Person, arguments: tuple[str, ...], locale: str
) -> None:
    env = {**person.environment(me.home), "LC_ALL": locale}
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            person.words_of(*arguments), cwd=me.folder, env=env, stdout=full, stderr=subprocess.PIPE
        )
    assert (result.returncode, result.stderr.count(b"\n")) == (1, 1) and b"No space left on device" in result.stderr


@pytest.mark.parametrize("closed_fd", [1, 2])
def test_a_closed_output_is_not_an_error(me: Person, closed_fd: int) -> None:
    me.job(SHORT)
    for arguments in (("run",), ("ls",), ("--version",)):
        result = subprocess.run(
            person.words_of(*arguments),
            cwd=me.folder,
            env=person.environment(me.home),
            preexec_fn=lambda: os.close(closed_fd),
        )
        assert result.returncode == 0, arguments


def test_under_nohup_a_hangup_is_ignored(me: Person) -> None:
    me.job(SHORT + "import time\ntime.sleep(0.5)\n")
    command = person.words_of("run", "-o", "json")
    with subprocess.Popen(
        command, cwd=me.folder, env=person.environment(me.home), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    ) as process:  # fmt: skip
        eventually(lambda: list(me.home.glob("runs/*/events.jsonl")), "a run")
        os.kill(process.pid, signal.SIGHUP)
        assert process.wait(person.LIMIT_S) == 0


def test_a_detached_run_is_followed_and_stopped_by_other_commands(me: Person) -> None:
    me.job(STEADY)
    result = me.call("run", "--detach")
    run = me.run_folder().name
    assert (result.returncode, result.stdout) == (0, f"{run}\n")
    assert f"follow it with: paceline logs -f {run}" in result.stderr
    following = me.start("logs", "-f", run)
    eventually(lambda: json.loads(me.call("status", "-o", "json").stdout)["steps"] > 3, "steps")
    status = json.loads(me.call("status", run, "-o", "json").stdout)
    assert (status["status"], status["ended"]) == ("running", None)
    task = status["tasks"][0]
    assert (task["task"], task["state"]) == ("worker-0", "running") and psutil.pid_exists(task["pid"])
    refused = me.call("delete", run, "--yes")
    assert refused.returncode == 1 and me.run_folder().exists()
    stopped = me.call("stop", run)
    assert stopped.returncode == 0 and f"{run} has stopped" in stopped.stderr
    code, out = following.end()
    assert code == 0 and out.endswith("worker-0 | asked to end\n")
    report = json.loads(me.call("status", run, "-o", "json").stdout)
    assert (report["status"], report["reason"]) == ("stopped", "stopped by `paceline stop`")
    assert me.call("delete", run, "--yes").returncode == 0
    assert me.call("ls").stdout == ""


def test_scripts_wait_for_a_step_a_snapshot_and_the_end(me: Person) -> None:
    saves = """
    if step == 10:
        folder = os.environ["PACELINE_SNAPSHOT_DIR"]
        os.makedirs(f"{folder}/tmp")
        open(f"{folder}/tmp/state", "w").close()
        os.rename(f"{folder}/tmp", f"{folder}/step-10")
"""
    me.job(STEADY + saves)
    run = me.call("run", "--detach").stdout.strip()
    for condition, text in (("step=5", "has reached step 5"), ("snapshot=10", "has committed step 10: ")):
        result = me.call("wait", "--for", condition, "--timeout", "60s")
        assert result.returncode == 0 and f"{run} {text}" in result.stderr, result
    late = me.call("wait", run, "--for", "step=1000000", "--timeout", "0.2s")
    assert late.returncode == 124 and f"{run} has not reached step 1000000 within 0.2 s: its last step" in late.stderr

    waiting = {each: me.start("wait", run, "--for", each, "-o", "json") for each in ("ended", "step=1000000")}
    interrupted = me.start("wait", run)
    eventually(lambda: all(map(_reads_events, [*waiting.values(), interrupted])), "the commands to wait")
    os.kill(interrupted.process.pid, signal.SIGINT)
    assert interrupted.end() == (130, "") and interrupted.said == [f"interrupted; this does not stop {run}\n"]
    assert json.loads(me.call("status", "-o", "json").stdout)["status"] == "running"

    assert me.call("stop", run).returncode == 0
    code, out = waiting["ended"].end()
    assert (code, json.loads(out)["status"]) == (130, "stopped")
    code, out = waiting["step=1000000"].end()
    assert (code, json.loads(out)["error"]["kind"]) == (3, "EndedBefore")
    assert me.call("wait", run, "--for", "step=5").returncode == 0


def _reads_events(started: person.Started) -> bool:
    return any(file.path.endswith("/events.jsonl") for file in psutil.Process(started.process.pid).open_files())


@pytest.mark.parametrize(
    "arguments", [("stop", "--now"), ("delete", "digits", "--yes", "--force")], ids=lambda arguments: arguments[0]
)
def test_a_detached_run_is_killed_immediately_on_request(me: Person, arguments: tuple[str, ...]) -> None:
    me.job(DEAF)
    me.call("run", "--detach")
    eventually(lambda: json.loads(me.call("status", "-o", "json").stdout)["steps"], "steps")
    assert me.call(*arguments).returncode == 0


def test_a_killed_worker_is_reported(me: Person) -> None:
    me.job(STEADY, workers=2)
    started = me.start("run")
    started.wait_for(r"worker-1 \| step 3\n")
    pid = json.loads(me.call("status", "-o", "json").stdout)["tasks"][1]["pid"]
    os.kill(pid, signal.SIGKILL)
    started.wait_for(r"\* worker-1 was killed by SIGKILL\n")
    started.wait_for(r"\* restarting after a failure of worker-1 \(signal, 1 of 10 without progress\)")
    started.wait_for(r"\* starting .* \(generation 2\)")
    started.wait_for(r"\* training resumed: first step")
    os.kill(started.process.pid, signal.SIGINT)
    assert started.end()[0] == 130
    assert "  1 restart:\n" in started.said


def test_doctor_passes_on_this_machine(me: Person) -> None:
    result = me.call("doctor", "-o", "json")
    report = json.loads(result.stdout)
    checks = {check["name"]: check["result"] for check in report["checks"]}
    assert (result.returncode, report["ok"]) == (0, True)
    assert {"python", "cores", "memory", "disk", "ports", "clock", "open files", "runs", "gpus"} <= set(checks)
    assert [line.split()[0] for line in me.call("doctor").stdout.splitlines()].count("ok") >= 8


def test_doctor_names_what_is_wrong_and_the_remedy(me: Person) -> None:
    me.job(STEADY)
    me.call("run", "--detach")
    eventually(lambda: json.loads(me.call("status", "-o", "json").stdout)["steps"], "steps")
    supervisor = json.loads((me.run_folder() / "run.json").read_text())["supervisor"]
    os.kill(supervisor, signal.SIGKILL)
    run = me.run_folder().name
    eventually(lambda: json.loads(me.call("status", "-o", "json").stdout)["status"] == "failed", "the end")
    result = me.call("doctor")
    assert result.returncode == 0
    assert f"1 ended without a report: {run}\n      -> paceline delete {run}" in result.stdout
    proxied = me.call("doctor", http_proxy="http://10.0.0.1:3128", no_proxy="example.org")
    assert "warn  proxy" in proxied.stdout and "export no_proxy=localhost,127.0.0.1" in proxied.stdout
