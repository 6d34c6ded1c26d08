"""Job to plan: a pure function, the same bytes for the same job, and readable from its JSON."""

from __future__ import annotations

import json
from pathlib import Path

from paceline import plan
from paceline.job import load_text, planning

JOB = """
name: a
framework: tensorflow
strategy: parameter-server
command: [python, train.py]
env: {A: "1", B: "1"}
gpus: 1
roles:
  chief: {}
  worker: {replicas: 2, env: {B: "2"}, cpu: 2, memory: 1Gi}
  ps: {replicas: 2}
  evaluator: {command: [python, train.py, --evaluate]}
restart: {limit: 3, hang_after: 5m}
limits: {runtime: 1h}
"""


def make_plan(tmp_path: Path) -> plan.Plan:
    (tmp_path / "train.py").write_text("")
    return planning.make_plan(load_text(JOB, "job.yaml", tmp_path).job)


def test_the_same_job_gives_the_same_bytes(tmp_path: Path) -> None:
    assert plan.to_json(make_plan(tmp_path)) == plan.to_json(make_plan(tmp_path))


def test_a_plan_survives_json(tmp_path: Path) -> None:
    job_plan = make_plan(tmp_path)
    assert plan.from_data(json.loads(plan.to_json(job_plan))) == job_plan


def test_roles_override_the_job(tmp_path: Path) -> None:
    job_plan = make_plan(tmp_path)
    assert job_plan.role("worker").env == {"A": "1", "B": "2"} and job_plan.role("ps").env == {"A": "1", "B": "1"}
    assert job_plan.role("evaluator").command == ("python", "train.py", "--evaluate")


def test_gpus_of_the_job_are_for_the_roles_that_train(tmp_path: Path) -> None:
    job_plan = make_plan(tmp_path)
    assert {host.role: host.gpus for host in job_plan.hosts} == {"chief": 1, "worker": 1, "ps": 0, "evaluator": 0}


def test_which_roles_restart_with_each_other(tmp_path: Path) -> None:
    job_plan = make_plan(tmp_path)
    assert {role.name: role.restarts for role in job_plan.roles} == {
        "chief": plan.LEAD, "ps": plan.LEAD, "worker": plan.ALONE, "evaluator": plan.ALONE,
    }  # fmt: skip
    assert [role.name for role in job_plan.roles if role.decides] == ["chief"]


def test_a_plan_without_the_fields_for_clusters_is_read(tmp_path: Path) -> None:
    data = plan.to_data(make_plan(tmp_path))
    del data["tensorboard"], data["credentials"], data["kubernetes"], data["limits"]["keep_finished"], data["programs"]
    del data["serve"]
    assert plan.from_data(data) == make_plan(tmp_path)


def test_a_plan_has_the_choice_for_nan_only_if_it_is_not_the_default(tmp_path: Path) -> None:
    """An older Paceline would not read it."""
    assert "on_nan" not in plan.to_data(make_plan(tmp_path))["restart"]
    (tmp_path / "train.py").write_text("")
    text = JOB.replace("restart: {", "restart: {on_nan: stop, ")
    job_plan = planning.make_plan(load_text(text, "job.yaml", tmp_path).job)
    assert plan.to_data(job_plan)["restart"]["on_nan"] == "stop"
    assert plan.from_data(plan.to_data(job_plan)) == job_plan


def test_what_restarts_is_part_of_the_roles_that_train(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    head = "{name: a, framework: none, command: [python, train.py], roles: {worker: {replicas: 2}, evaluator: {}}"
    scopes = {
        more: planning.make_plan(load_text(f"{head}{more}}}", "job.yaml", tmp_path).job)
        for more in ("", ", restart: {scope: group}", ", restart: {scope: host}", ", restart: {scope: task}")
    }
    default, *others = scopes.values()
    assert [each.role("worker").restarts for each in scopes.values()] == [plan.GROUP, plan.GROUP, plan.HOST, plan.TASK]
    assert [each.restart_scope for each in scopes.values()] == [plan.GROUP, plan.GROUP, plan.HOST, plan.TASK]
    assert [each.keeps_addresses for each in scopes.values()] == [False, False, True, True]
    assert {each.role("evaluator").restarts for each in scopes.values()} == {plan.ALONE}
    assert others[0] == default
    assert all(plan.from_data(plan.to_data(each)) == each for each in others)
    assert all(each.tasks == default.tasks for each in others), "ranks count over all tasks"


def test_tasks_that_restart_together_are_a_group_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    text = "{name: a, framework: torch, command: [python, train.py], roles: {worker: {replicas: 2, tasks_per_host: 2}}"

    def ranks(scope: str) -> dict[str, int]:
        job_plan = planning.make_plan(load_text(f"{text}, restart: {{scope: {scope}}}}}", "job.yaml", tmp_path).job)
        return {task.name: task.rank for task in job_plan.of_unit(job_plan.task("worker-3")).tasks}

    assert ranks("group") == {f"worker-{rank}": rank for rank in range(4)}
    assert ranks("host") == {"worker-2": 0, "worker-3": 1}
    assert ranks("task") == {"worker-3": 0}


def test_try_and_export_have_the_variables_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    text = JOB + "try: {command: [python, train.py, --try]}\nexport: {command: [python, train.py, --export]}\n"
    job_plan = planning.make_plan(load_text(text, "job.yaml", tmp_path).job)
    assert job_plan.programs == {
        "try": plan.Program(("python", "train.py", "--try"), {"A": "1", "B": "1"}),
        "export": plan.Program(("python", "train.py", "--export"), {"A": "1", "B": "1"}),
    }
    assert plan.from_data(plan.to_data(job_plan)) == job_plan


def test_try_and_export_have_the_keras_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    text = "name: a\nframework: tensorflow\ncommand: [python, train.py]\ntensorflow: {keras: legacy}\n"
    job_plan = planning.make_plan(load_text(f"{text}try: {{command: [python, train.py]}}\n", "job.yaml", tmp_path).job)
    assert job_plan.programs["try"].env == job_plan.roles[0].env == {"TF_USE_LEGACY_KERAS": "1"}


def test_the_order_of_keys_does_not_change_the_bytes(tmp_path: Path) -> None:
    first = "kubernetes: {labels: {a: b, c: d}, pod: {e: {f: 1, g: [h]}, i: null}}\ncredentials: {secret: a, file: b}\n"
    second = (
        "credentials: {file: b, secret: a}\nkubernetes: {pod: {i: null, e: {g: [h], f: 1}}, labels: {c: d, a: b}}\n"
    )
    (tmp_path / "train.py").write_text("")
    plans = [planning.make_plan(load_text(JOB + more, "job.yaml", tmp_path).job) for more in (first, second)]
    assert plan.to_json(plans[0]) == plan.to_json(plans[1])


def test_a_plan_shares_nothing_with_its_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    job = load_text(JOB + "kubernetes: {pod: {a: {b: [1]}}}\n", "job.yaml", tmp_path).job
    planning.make_plan(job).kubernetes["pod"]["a"]["b"].append(2)
    assert planning.make_plan(job).kubernetes["pod"] == {"a": {"b": [1]}}


def test_a_plan_of_another_version_is_rejected(tmp_path: Path) -> None:
    data = {**plan.to_data(make_plan(tmp_path)), "version": 99}
    try:
        plan.from_data(data)
    except ValueError as error:
        assert "started by a newer Paceline (plan version 99)" in str(error)
    else:
        raise AssertionError("accepted")
