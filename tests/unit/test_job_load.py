"""Jobs that are right: what comes out of the file, the overrides, the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import job, plan

TEXT = "name: digits\nframework: tensorflow\ncommand: [python, train.py]  # the program\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text("")
    return tmp_path


def load(text: str, folder: Path, *overrides: str) -> job.Loaded:
    return job.load_text(text, "job.yaml", folder, overrides)


def refused(text: str, folder: Path, *overrides: str) -> str:
    with pytest.raises(job.JobError) as caught:
        load(text, folder, *overrides)
    return str(caught.value)


def test_the_least_job(folder: Path) -> None:
    loaded = load(TEXT, folder)
    assert loaded.text == TEXT and loaded.notes == []
    made = loaded.job
    assert (made.name, made.framework, made.strategy) == ("digits", "tensorflow", "multi-worker")
    assert made.command == ["python", "train.py"] and made.code == str(folder) and made.env == {}
    assert [group.replicas for group in made.roles["worker"]] == [1] and list(made.roles) == ["worker"]
    assert (made.restart.limit, made.restart.hang_after, made.restart.warm) == (10, None, True)
    assert (made.limits.start, made.limits.runtime, made.limits.grace) == (1800.0, None, 30.0)
    assert (made.cpu, made.memory, made.gpus, made.kubernetes) == (None, None, None, None)
    assert (made.tensorboard, made.credentials, made.limits.keep_finished) == (None, None, 3600.0)


def test_every_field(folder: Path) -> None:
    made = load(
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
    assert made.notes == ["kubernetes: not used on this machine"]
    one = made.job
    assert one.code == str(folder / "sub") and one.cpu == 0.5 and one.memory == 512 * 2**20
    assert one.roles["worker"][0].memory == 8 * 10**9 and one.roles["worker"][1].memory == 2**20
    assert one.restart.hang_after == 5400.0 and one.restart.warm is False and one.restart.limit == 0
    assert (one.limits.start, one.limits.runtime, one.limits.grace) == (90.0, 172800.0, 0.5)
    assert one.env == {"SEED": "7", "EMPTY": "", "OMP_NUM_THREADS": "2"}
    made_plan = plan.make(one)
    assert [len(made_plan.tasks_of(role)) for role in plan.ORDER] == [1, 5, 2, 1]


def test_servers_may_go_without_a_command_under_a_chief(folder: Path) -> None:
    text = "name: a\nframework: tensorflow\nstrategy: parameter-server\n"
    chief = text + "roles: {chief: {command: [python, train.py]}, worker: {}, ps: {}}\n"
    assert plan.make(load(chief, folder).job).role("worker").command == ()
    none = text + "roles: {worker: {command: [python, train.py]}, ps: {}}\n"
    assert plan.make(load(none, folder).job).role("ps").command == ()


def test_fields_that_every_role_has_of_its_own_are_noted(folder: Path) -> None:
    loaded = load(TEXT + "cpu: 1\ngpus: 1\nroles: {worker: {cpu: 2}}\n", folder)
    assert loaded.notes == ["cpu: not used, every role has its own"]


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


def test_the_folder_is_that_of_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "job.yaml").write_text(TEXT + "code: sub\n")
    monkeypatch.chdir(folder.parent)
    loaded = job.load(Path(folder.name) / "job.yaml", ["name=other"])
    assert loaded.job.code == str(folder / "sub") and loaded.job.name == "other"


OVERRIDES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "a number": ("roles.worker.replicas=4", lambda made: made.roles["worker"][0].replicas == 4),
    "with an index": ("roles.worker.0.replicas=4", lambda made: made.roles["worker"][0].replicas == 4),
    "a new role": ("roles.evaluator.replicas=2", lambda made: made.roles["evaluator"][0].replicas == 2),
    "a mapping": ("restart={limit: 3, warm: false}", lambda made: made.restart.limit == 3 and not made.restart.warm),
    "a list": ("command=[python, sub/train.py]", lambda made: made.command == ["python", "sub/train.py"]),
    "a word of a command": ("command.1=sub/train.py", lambda made: made.command == ["python", "sub/train.py"]),
    "a variable": ("env.SEED=007", lambda made: made.env == {"SEED": "007"}),
    "an empty variable": ("env.SEED=", lambda made: made.env == {"SEED": ""}),
    "a variable with signs": ("env.URL=a=b: [c #", lambda made: made.env == {"URL": "a=b: [c #"}),
    "a variable of a role": ("roles.worker.env.SEED=7", lambda made: made.roles["worker"][0].env == {"SEED": "7"}),
    "a time": ("limits.runtime=1h", lambda made: made.limits.runtime == 3600.0),
    "an image": ("kubernetes.image=a/b:c", lambda made: made.kubernetes.image == "a/b:c"),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_an_override(case: str, folder: Path) -> None:
    override, holds = OVERRIDES[case]
    loaded = load(TEXT + "roles: {worker: {replicas: 2}}\n", folder, override)
    assert holds(loaded.job)
    assert load(loaded.text, folder).job == loaded.job


WRONG_OVERRIDES = {
    "replicas": (
        "roles.worker.replicas=0",
        "roles.worker.replicas: must be at least 1, got 0; allowed: a whole number from 1 to 100000",
    ),
    "no equals sign": ("roles.worker.replicas", 'has no "="; write --set roles.worker.replicas=4'),
    "no name": ("=3", "has an empty name; write --set roles.worker.replicas=4"),
    "a hole in the path": ("roles..replicas=3", "has an empty name; write --set roles.worker.replicas=4"),
    "unknown": (
        "roles.worker.replics=3",
        'roles.worker.replics: unknown key "replics"; did you mean "replicas"? '
        "allowed: command, cpu, env, gpus, memory, replicas, tasks_per_host",
    ),
    "unknown section": (
        "restrat.limit=3",
        'restrat: unknown key "restrat"; did you mean "restart"? allowed: code, command, cpu, credentials, env, '
        "export, framework, gpus, ingest, kubernetes, limits, memory, name, restart, roles, serve, snapshots, "
        "strategy, tensorboard, tensorflow, try",
    ),
    "unknown role": (
        "roles.workr.replicas=3",
        'roles.workr: unknown role "workr"; did you mean "worker"? allowed: chief, worker, evaluator',
    ),
    "no such group": (
        "roles.worker.1.replicas=3",
        'roles.worker.1.replicas: "roles.worker" is one group: there is no group 1; the first is 0',
    ),
    "no such item": ("command.7=a", 'command.7: "command" has no item 7: it holds 2; the first is 0'),
    "within a text": ("name.a=3", 'name.a: "name" holds digits: nothing within it can be set'),
    "not YAML": ("command=[a", 'not YAML: the list "[" opened on line 1 is not closed by "]", or lacks a ","'),
    "nothing": ("limits.runtime=", "limits.runtime: has no value; give it one, or remove the key"),
    "a variable of ours": ("env.RANK=3", 'env.RANK: "RANK" is set by Paceline itself, for each task; remove it'),
    "a missing script": (
        "command.1=trian.py",
        'command.1: the script "trian.py" is not there: looked in FOLDER; did you mean "train.py"?',
    ),
}


@pytest.mark.parametrize("case", WRONG_OVERRIDES)
def test_a_wrong_override(case: str, folder: Path) -> None:
    override, message = WRONG_OVERRIDES[case]
    shown = refused(TEXT + "roles: {worker: {replicas: 2}}\n", folder, override)
    assert shown.replace(str(folder), "FOLDER") == f"--set {override}: {message}"


@pytest.mark.parametrize("override", ["\udcff=3", "env.A=\udcff", "name=\udcff", "env.A=\0"])
def test_an_override_that_is_not_text(override: str, folder: Path) -> None:
    assert refused(TEXT, folder, override).endswith(": holds a character that no program can be given")


def test_a_command_that_is_not_text(folder: Path) -> None:
    text = job.from_command("none", 1, command=["sh", "\udcff"], folder=folder)
    assert "command.1: holds the character \\udcff, which no program can be given" in refused(text, folder)
    assert "U+DCFF may not stand in a text file" in refused("name: \udcff\n", folder)


def test_an_override_of_one_among_several_groups(folder: Path) -> None:
    text = TEXT + "roles:\n  worker:\n    - {replicas: 1}\n    - {replicas: 2}\n"
    assert [group.replicas for group in load(text, folder, "roles.worker.1.replicas=5").job.roles["worker"]] == [1, 5]
    assert refused(text, folder, "roles.worker.replicas=5") == (
        '--set roles.worker.replicas=5: roles.worker.replicas: "roles.worker" is a list of 2: say which item is meant; '
        "write roles.worker.0.replicas"
    )
    single = TEXT + "roles:\n  worker:\n    - {replicas: 1}\n"
    assert load(single, folder, "roles.worker.replicas=5").job.roles["worker"][0].replicas == 5


def test_overrides_are_applied_in_order_and_can_mend_a_file(folder: Path) -> None:
    loaded = load(TEXT + "gpus: -1\n", folder, "gpus=3", "gpus=0")
    assert loaded.job.gpus == 0


def test_a_command_without_a_file(folder: Path) -> None:
    text = job.from_command("torch", 4, command=["python", "train.py", "--epochs", "3"], folder=folder)
    assert text == (
        'name: train\nframework: torch\ncommand: [python, train.py, --epochs, "3"]\nroles:\n  worker: {replicas: 4}\n'
    )
    assert load(text, folder).job.command == ["python", "train.py", "--epochs", "3"]


def test_a_command_with_servers(folder: Path) -> None:
    text = job.from_command(
        "tensorflow", 2, ps=1, chief=True, evaluator=True, gpus=1, command=["python", "train.py"], folder=folder
    )
    assert text == (
        "name: train\nframework: tensorflow\nstrategy: parameter-server\ncommand: [python, train.py]\nroles:\n"
        "  chief: {replicas: 1, gpus: 1}\n  worker: {replicas: 2, gpus: 1}\n  ps: {replicas: 1}\n"
        "  evaluator: {replicas: 1}\n"
    )
    assert len(plan.make(load(text, folder).job).tasks) == 5


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
    text = job.from_command("none", 1, command=command, folder=folder)
    assert text.startswith(f"name: {name}\n")


@pytest.mark.parametrize(
    "words",
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
def test_any_words_of_a_command_come_back(words: list[str], folder: Path) -> None:
    command = ["sh", "-c", *[word or "x" for word in words], 'q"\\']
    text = job.from_command("none", 1, command=command, folder=folder)
    assert load(text, folder).job.command == command


def test_mistakes_of_a_command_are_reported_too(folder: Path) -> None:
    text = job.from_command("torch", 0, ps=1, command=["python", "trian.py"], folder=folder)
    shown = refused(text, folder)
    assert "roles.worker.replicas: must be at least 1, got 0" in shown
    assert 'roles.ps: a torch job has no role "ps"' in shown and 'did you mean "train.py"?' in shown
