"""Valid jobs: how the file, the overrides and the command line are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import job, plan
from paceline.job import planning
from paceline.job.new_job_file import job_text

TEXT = "name: digits\nframework: tensorflow\ncommand: [python, train.py]  # the program\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text("")
    return tmp_path


def load(text: str, folder: Path, *overrides: str) -> job.LoadedJob:
    return job.load_text(text, "job.yaml", folder, overrides)


def load_error(text: str, folder: Path, *overrides: str) -> str:
    with pytest.raises(job.JobError) as caught:
        load(text, folder, *overrides)
    return str(caught.value)


def test_the_minimal_job(folder: Path) -> None:
    loaded = load(TEXT, folder)
    assert loaded.text == TEXT and loaded.notes == []
    parsed = loaded.job
    assert (parsed.name, parsed.framework, parsed.strategy) == ("digits", "tensorflow", "multi-worker")
    assert parsed.command == ["python", "train.py"] and parsed.code == str(folder) and parsed.env == {}
    assert [group.replicas for group in parsed.roles["worker"]] == [1] and list(parsed.roles) == ["worker"]
    assert (parsed.restart.limit, parsed.restart.hang_after, parsed.restart.warm) == (10, None, True)
    assert (parsed.limits.start, parsed.limits.runtime, parsed.limits.grace) == (1800.0, None, 30.0)
    assert (parsed.cpu, parsed.memory, parsed.gpus, parsed.kubernetes) == (None, None, None, None)
    assert (parsed.tensorboard, parsed.credentials, parsed.limits.keep_finished) == (None, None, 3600.0)


def test_every_field(folder: Path) -> None:
    loaded = load(
        """
name: digits-2
framework: tensorflow
strategy: parameter-server
command: [python, train.py, --epochs, "20"]
code: sub
env: {SEED: "7", EMPTY: "", OMP_NUM_THREADS: "2"}
cpu: 500m
memory: 512Mi
gpus: 0
roles:
  chief: {replicas: 1, cpu: 2}
  worker:
    - {replicas: 2, gpus: 4, tasks_per_host: 2, memory: 8G}
    - {replicas: 1, memory: 1048576}
  ps: {replicas: 2, env: {A: b}}
  evaluator: {command: [python, -c, pass]}
restart: {limit: 0, hang_after: 1h30m, warm: false}
limits: {start: 90, runtime: 2d, grace: 0.5s}
kubernetes: {image: "a/b:1", namespace: 2-team}
""",
        folder,
    )
    assert loaded.notes == ["kubernetes: not used on this machine"]
    parsed = loaded.job
    assert parsed.code == str(folder / "sub") and parsed.cpu == 0.5 and parsed.memory == 512 * 2**20
    assert parsed.roles["worker"][0].memory == 8 * 10**9 and parsed.roles["worker"][1].memory == 2**20
    assert parsed.restart.hang_after == 5400.0 and parsed.restart.warm is False and parsed.restart.limit == 0
    assert (parsed.limits.start, parsed.limits.runtime, parsed.limits.grace) == (90.0, 172800.0, 0.5)
    assert parsed.env == {"SEED": "7", "EMPTY": "", "OMP_NUM_THREADS": "2"}
    job_plan = planning.make_plan(parsed)
    assert [len(job_plan.tasks_of(role)) for role in plan.ORDER] == [1, 5, 2, 1]


def test_parameter_server_roles_may_omit_the_command(folder: Path) -> None:
    text = "name: a\nframework: tensorflow\nstrategy: parameter-server\n"
    with_chief = text + "roles: {chief: {command: [python, train.py]}, worker: {}, ps: {}}\n"
    assert planning.make_plan(load(with_chief, folder).job).role("worker").command == ()
    without_chief = text + "roles: {worker: {command: [python, train.py]}, ps: {}}\n"
    assert planning.make_plan(load(without_chief, folder).job).role("ps").command == ()


def test_a_note_names_fields_that_every_role_overrides(folder: Path) -> None:
    loaded = load(TEXT + "cpu: 1\ngpus: 1\nroles: {worker: {cpu: 2}}\n", folder)
    assert loaded.notes == ["cpu: not used, because every role sets its own"]


def test_anchors_and_merges_within_bounds(folder: Path) -> None:
    text = TEXT + "roles:\n  worker: &w {replicas: 2, cpu: 1}\n  evaluator: {replicas: 1, <<: *w}\n"
    roles = load(text, folder).job.roles
    assert (roles["evaluator"][0].replicas, roles["evaluator"][0].cpu, roles["worker"][0].replicas) == (1, 1.0, 2)
    # An override reaches the role it names, not the one it was merged into.
    roles = load(text, folder, "roles.worker.cpu=4").job.roles
    assert (roles["evaluator"][0].cpu, roles["worker"][0].cpu) == (1.0, 4.0)


@pytest.mark.parametrize("text", ["\ufeff" + TEXT, TEXT.replace("\n", "\r\n"), "---\n" + TEXT + "...\n"])
def test_other_forms_of_text(text: str, folder: Path) -> None:
    assert load(text, folder).job.name == "digits" and load(text, folder).text == text


def test_a_job_in_json(folder: Path) -> None:
    text = '{"name": "a", "framework": "none", "command": ["sh", "-c", "\\ud83d\\ude00"]}'
    assert load(text, folder).job.command == ["sh", "-c", "\U0001f600"]


def test_code_is_relative_to_the_job_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "job.yaml").write_text(TEXT + "code: sub\n")
    monkeypatch.chdir(folder.parent)
    loaded = job.load(Path(folder.name) / "job.yaml", ["name=other"])
    assert loaded.job.code == str(folder / "sub") and loaded.job.name == "other"


OVERRIDES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "a number": ("roles.worker.replicas=4", lambda parsed: parsed.roles["worker"][0].replicas == 4),
    "with an index": ("roles.worker.0.replicas=4", lambda parsed: parsed.roles["worker"][0].replicas == 4),
    "a new role": ("roles.evaluator.replicas=2", lambda parsed: parsed.roles["evaluator"][0].replicas == 2),
    "a mapping": (
        "restart={limit: 3, warm: false}",
        lambda parsed: parsed.restart.limit == 3 and not parsed.restart.warm,
    ),
    "a list": ("command=[python, sub/train.py]", lambda parsed: parsed.command == ["python", "sub/train.py"]),
    "an argument of a command": ("command.1=sub/train.py", lambda parsed: parsed.command == ["python", "sub/train.py"]),
    "a variable": ("env.SEED=007", lambda parsed: parsed.env == {"SEED": "007"}),
    "an empty variable": ("env.SEED=", lambda parsed: parsed.env == {"SEED": ""}),
    "a variable with signs": ("env.URL=a=b: [c #", lambda parsed: parsed.env == {"URL": "a=b: [c #"}),
    "a variable of a role": ("roles.worker.env.SEED=7", lambda parsed: parsed.roles["worker"][0].env == {"SEED": "7"}),
    "a time": ("limits.runtime=1h", lambda parsed: parsed.limits.runtime == 3600.0),
    "an image": ("kubernetes.image=a/b:c", lambda parsed: parsed.kubernetes.image == "a/b:c"),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_an_override(case: str, folder: Path) -> None:
    override, check = OVERRIDES[case]
    loaded = load(TEXT + "roles: {worker: {replicas: 2}}\n", folder, override)
    assert check(loaded.job)
    assert load(loaded.text, folder).job == loaded.job


WRONG_OVERRIDES = {
    "replicas": (
        "roles.worker.replicas=0",
        "roles.worker.replicas: must be at least 1, got 0; allowed: a whole number from 1 to 100000",
    ),
    "no equals sign": ("roles.worker.replicas", 'has no "="; write --set roles.worker.replicas=4'),
    "no name": ("=3", "has an empty key; write --set roles.worker.replicas=4"),
    "an empty step in the path": ("roles..replicas=3", "has an empty key; write --set roles.worker.replicas=4"),
    "unknown": (
        "roles.worker.replics=3",
        'roles.worker.replics: unknown key "replics"; did you mean "replicas"? '
        "allowed: command, cpu, env, gpus, max, memory, min, replicas, share, tasks_per_host",
    ),
    "unknown section": (
        "restrat.limit=3",
        'restrat: unknown key "restrat"; did you mean "restart"? allowed: code, command, cpu, credentials, elastic, '
        "env, env_of, export, framework, gpus, ingest, kubernetes, limits, memory, metrics, name, notify, restart, "
        "roles, serve, snapshots, strategy, tensorboard, tensorflow, track, try",
    ),
    "unknown role": (
        "roles.workr.replicas=3",
        'roles.workr: unknown role "workr"; did you mean "worker"? allowed: chief, worker, evaluator',
    ),
    "no such group": (
        "roles.worker.1.replicas=3",
        'roles.worker.1.replicas: "roles.worker" has one host pool: there is no host pool 1; the first host pool is 0',
    ),
    "no such item": ("command.7=a", 'command.7: "command" has no item 7: its length is 2; the first item is 0'),
    "within a text": ("name.a=3", 'name.a: "name" is the single value digits: it has no keys to set'),
    "not YAML": ("command=[a", 'not YAML: the list "[" opened on line 1 is not closed with "]", or a "," is missing'),
    "nothing": ("limits.runtime=", "limits.runtime: has no value; give it a value, or remove the key"),
    "a reserved variable": ("env.RANK=3", 'env.RANK: "RANK" is set by Paceline for each task; remove it'),
    "a missing script": (
        "command.1=trian.py",
        'command.1: the script "trian.py" does not exist: looked in FOLDER; did you mean "train.py"?',
    ),
}


@pytest.mark.parametrize("case", WRONG_OVERRIDES)
def test_a_wrong_override(case: str, folder: Path) -> None:
    override, message = WRONG_OVERRIDES[case]
    error = load_error(TEXT + "roles: {worker: {replicas: 2}}\n", folder, override)
    assert error.replace(str(folder), "FOLDER") == f"--set {override}: {message}"


@pytest.mark.parametrize("override", ["\udcff=3", "env.A=\udcff", "name=\udcff", "env.A=\0"])
def test_an_override_that_is_not_text(override: str, folder: Path) -> None:
    assert load_error(TEXT, folder, override).endswith(": contains a character that cannot be passed to a program")


def test_a_command_that_is_not_text(folder: Path) -> None:
    text = job_text("none", 1, command=["sh", "\udcff"], folder=folder)
    assert "command.1: contains the character \\udcff, which cannot be passed to a program" in load_error(text, folder)
    assert "U+DCFF is not allowed in a text file" in load_error("name: \udcff\n", folder)


def test_an_override_of_one_of_several_groups(folder: Path) -> None:
    text = TEXT + "roles:\n  worker:\n    - {replicas: 1}\n    - {replicas: 2}\n"
    assert [group.replicas for group in load(text, folder, "roles.worker.1.replicas=5").job.roles["worker"]] == [1, 5]
    assert load_error(text, folder, "roles.worker.replicas=5") == (
        '--set roles.worker.replicas=5: roles.worker.replicas: "roles.worker" is a list of 2 items: choose one of '
        "them; "
        "write roles.worker.0.replicas"
    )
    single = TEXT + "roles:\n  worker:\n    - {replicas: 1}\n"
    assert load(single, folder, "roles.worker.replicas=5").job.roles["worker"][0].replicas == 5


def test_overrides_are_applied_in_order_and_can_fix_a_file(folder: Path) -> None:
    loaded = load(TEXT + "gpus: -1\n", folder, "gpus=3", "gpus=0")
    assert loaded.job.gpus == 0


def test_a_command_without_a_file(folder: Path) -> None:
    text = job_text("torch", 4, command=["python", "train.py", "--epochs", "3"], folder=folder)
    assert text == (
        'name: train\nframework: torch\ncommand: [python, train.py, --epochs, "3"]\nroles:\n  worker: {replicas: 4}\n'
    )
    assert load(text, folder).job.command == ["python", "train.py", "--epochs", "3"]


def test_a_command_with_servers(folder: Path) -> None:
    text = job_text(
        "tensorflow", 2, ps=1, chief=True, evaluator=True, gpus=1, command=["python", "train.py"], folder=folder
    )
    assert text == (
        "name: train\nframework: tensorflow\nstrategy: parameter-server\ncommand: [python, train.py]\nroles:\n"
        "  chief: {replicas: 1, gpus: 1}\n  worker: {replicas: 2, gpus: 1}\n  ps: {replicas: 1}\n"
        "  evaluator: {replicas: 1}\n"
    )
    assert len(planning.make_plan(load(text, folder).job).tasks) == 5


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-u", "src/Train_Model.v2.py"], "train-model-v2"),
        (["python", "-m", "pkg.digits"], "digits"),
        (["./run.sh"], "run"),
        (["python", "-c", "pass"], "python"),
        (["python", "123.py"], "python"),
        (["python", "a" * 60 + ".py"], "a" * 40),
    ],
)
def test_the_name_comes_from_the_script(command: list[str], name: str, folder: Path) -> None:
    text = job_text("none", 1, command=command, folder=folder)
    assert text.startswith(f"name: {name}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [
            "a b",
            "--x=1",
            "1e3",
            "yes",
            "true",
            "~",
            "",
            "- a",
            "#",
            "a: b",
            "a #b",
            "é",
            "\n",
            "\x7f",
            "😀",
            "2026-01-01",
        ]
    ],
)
def test_any_arguments_of_a_command_are_preserved(arguments: list[str], folder: Path) -> None:
    command = ["sh", "-c", *[argument or "x" for argument in arguments], 'q"\\']
    text = job_text("none", 1, command=command, folder=folder)
    assert load(text, folder).job.command == command


def test_mistakes_of_a_command_are_reported_too(folder: Path) -> None:
    text = job_text("torch", 0, ps=1, command=["python", "trian.py"], folder=folder)
    error = load_error(text, folder)
    assert "roles.worker.replicas: must be at least 1, got 0" in error
    assert 'roles.ps: a torch job has no role "ps"' in error and 'did you mean "train.py"?' in error
