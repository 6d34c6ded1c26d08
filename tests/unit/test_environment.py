"""The environment variables of each task, for each framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import plan
from paceline.frameworks import environment
from paceline.job import load_text, planning


def plan_of(tmp_path: Path, text: str) -> plan.Plan:
    (tmp_path / "train.py").write_text("")
    return planning.make_plan(load_text(text, "job.yaml", tmp_path).job)


def roster(job_plan: plan.Plan) -> dict[str, str]:
    return {task.name: f"10.0.0.{number}:{5000 + number}" for number, task in enumerate(job_plan.tasks)}


def variables_of(job_plan: plan.Plan, name: str, **more: Any) -> dict[str, str]:
    task = next(task for task in job_plan.tasks if task.name == name)
    generation, restarts = more.get("generation", 1), more.get("restarts", 0)
    return environment.task_variables(
        job_plan, task, roster(job_plan), "run-1234", generation, restarts, more.get("machine")
    )


MULTI_WORKER = """
name: a
framework: tensorflow
command: [python, train.py]
roles: {worker: {replicas: 12}, evaluator: {}}
"""


def test_tf_config_is_valid_json_in_order_and_without_the_evaluator(tmp_path: Path) -> None:
    job_plan = plan_of(tmp_path, MULTI_WORKER)
    config = json.loads(variables_of(job_plan, "worker-11")["TF_CONFIG"])
    assert config["task"] == {"type": "worker", "index": 11}
    assert list(config["cluster"]) == ["worker"]
    assert config["cluster"]["worker"] == [f"10.0.0.{n}:{5000 + n}" for n in range(12)]
    evaluator = json.loads(variables_of(job_plan, "evaluator-0")["TF_CONFIG"])
    assert evaluator["task"] == {"type": "evaluator", "index": 0} and "evaluator" not in evaluator["cluster"]


def test_keras_is_patched_unless_the_job_says_otherwise(tmp_path: Path) -> None:
    def keras_settings(more: str) -> tuple[str | None, str | None]:
        job_plan = plan_of(tmp_path, MULTI_WORKER + more)
        return variables_of(job_plan, "worker-0").get("PACELINE_PATCH_KERAS"), job_plan.role("worker").env.get(
            "TF_USE_LEGACY_KERAS"
        )

    assert keras_settings("") == ("1", None)
    assert keras_settings("tensorflow: {patch_keras: false}") == (None, None)
    assert keras_settings("tensorflow: {keras: legacy}") == (None, "1")
    torch = "{name: a, framework: torch, command: [python, train.py]}"
    assert "PACELINE_PATCH_KERAS" not in variables_of(plan_of(tmp_path, torch), "worker-0")


def test_workers_compare_initial_values_if_all_run_the_same_command(tmp_path: Path) -> None:
    def compares(text: str) -> bool:
        return variables_of(plan_of(tmp_path, text), "worker-0").get("PACELINE_COMPARE_INITIAL_VALUES") == "1"

    assert compares(MULTI_WORKER)
    with_chief = "{name: a, framework: tensorflow, command: [python, train.py], roles: {chief: %s, worker: {}}}"
    assert compares(with_chief % "{}")
    assert not compares(with_chief % "{command: [python, -I, train.py]}")
    roles = "roles: {chief: {}, worker: {}, ps: {}}"
    assert not compares(
        "{name: a, framework: tensorflow, strategy: parameter-server, command: [python, train.py], " + roles + "}"
    )


def test_all_tasks_of_a_group_but_the_first_know_at_which_address_that_one_listens(tmp_path: Path) -> None:
    def leaders(text: str) -> list[str | None]:
        job_plan = plan_of(tmp_path, text)
        return [variables_of(job_plan, task.name).get("PACELINE_LEADER") for task in job_plan.tasks]

    jax = "{name: a, framework: jax, command: [python, train.py], roles: {worker: {replicas: 2}, evaluator: {}}}"
    assert leaders(jax) == [None, "10.0.0.0:5000", None]
    with_chief = "{name: a, framework: tensorflow, command: [python, train.py], roles: {chief: {}, worker: {}}}"
    assert leaders(with_chief) == [None, "10.0.0.0:5000"]
    assert not any(leaders("{name: a, framework: torch, command: [python, train.py], roles: {worker: {replicas: 2}}}"))
    roles = "roles: {chief: {}, worker: {}, ps: {}}"
    parameter_server = "{name: a, framework: tensorflow, strategy: parameter-server, command: [python, train.py], "
    assert not any(leaders(parameter_server + roles + "}"))


def test_the_contract_of_any_image(tmp_path: Path) -> None:
    text = "{name: a, framework: tensorflow, strategy: parameter-server, command: [python, train.py],"
    job_plan = plan_of(tmp_path, text + " roles: {worker: {replicas: 2}, ps: {}}}")
    variables = variables_of(job_plan, "ps-0")
    assert variables["POD_NAME"] == "ps-0"
    assert json.loads(variables["CLUSTER_CONFIG"]) == {
        "worker": ["10.0.0.0:5000", "10.0.0.1:5001"],
        "ps": ["10.0.0.2:5002"],
    }


def test_torch_ranks_span_hosts_of_different_sizes(tmp_path: Path) -> None:
    text = "{name: a, framework: torch, command: [python, train.py], roles: {worker: [{gpus: 1}, {gpus: 8}]}}"
    job_plan = plan_of(tmp_path, text)
    assert len(job_plan.tasks) == 9
    variables = variables_of(job_plan, "worker-5", restarts=2)
    expected = {
        "MASTER_ADDR": "10.0.0.0", "MASTER_PORT": "5000", "RANK": "5", "WORLD_SIZE": "9", "LOCAL_RANK": "4",
        "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2",
    }  # fmt: skip
    assert {name: variables[name] for name in expected} == expected


LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def local_variables(job_plan: plan.Plan, machine: dict[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Of all workers: the local and group variables."""
    all_variables = [variables_of(job_plan, task.name, machine=machine) for task in job_plan.tasks_of("worker")]
    return [tuple(variables[name] for name in LOCAL) for variables in all_variables]


def test_torch_counts_local_ranks_over_the_machine(tmp_path: Path) -> None:
    """As torchrun --nproc-per-node does: `if local_rank == 0` is true once."""
    groups = "[{replicas: 2}, {tasks_per_host: 2}]"
    text = f"{{name: a, framework: torch, command: [python, train.py], roles: {{worker: {groups}, evaluator: {{}}}}}}"
    job_plan = plan_of(tmp_path, text)
    together = {host.name: () for host in job_plan.hosts}
    assert local_variables(job_plan, together) == [(str(rank), "4", "0", "1") for rank in range(4)]
    # On a cluster, each host is a pod of its own.
    assert local_variables(job_plan, {}) == [
        ("0", "1", "0", "3"), ("0", "1", "1", "3"), ("0", "2", "2", "3"), ("1", "2", "2", "3"),
    ]  # fmt: skip
    task = variables_of(job_plan, "worker-3", machine=together)
    assert (task["PACELINE_LOCAL_INDEX"], task["PACELINE_LOCAL_WORLD_SIZE"]) == ("1", "2")


def visible_devices(job_plan: plan.Plan, machine: dict[str, tuple[str, ...]]) -> list[list[str]]:
    return [
        environment.gpus(job_plan, task, machine[task.host], machine)["CUDA_VISIBLE_DEVICES"].split(",")
        for task in job_plan.tasks_of("worker")
    ]


def test_the_local_rank_is_the_index_of_a_gpu_of_the_own_host(tmp_path: Path) -> None:
    # Two hosts with two GPUs, of which one runs one task; a third without a GPU.
    groups = "[{gpus: 2, tasks_per_host: 1}, {gpus: 2}, {gpus: 0}]"
    text = f"{{name: a, framework: torch, command: [python, train.py], roles: {{worker: {groups}}}}}"
    job_plan = plan_of(tmp_path, text)
    machine = {"worker-host-0": ("3", "4"), "worker-host-1": ("5", "6"), "worker-host-2": ()}
    devices = visible_devices(job_plan, machine)
    assert devices == [["3", "5", "6", "4"]] * 3 + [[""]]
    ranks = [int(variables_of(job_plan, f"worker-{index}", machine=machine)["LOCAL_RANK"]) for index in range(4)]
    assert ranks == [0, 1, 2, 3]
    assert [devices[index][rank] for index, rank in enumerate(ranks[:3])] == ["3", "5", "6"]


def test_tasks_with_gpus_have_the_first_local_ranks(tmp_path: Path) -> None:
    text = "{name: a, framework: torch, command: [python, train.py], roles: {worker: [{gpus: 0}, {gpus: 1}]}}"
    job_plan = plan_of(tmp_path, text)
    machine = {"worker-host-0": (), "worker-host-1": ("7",)}
    assert [variables[0] for variables in local_variables(job_plan, machine)] == ["1", "0"]
    assert visible_devices(job_plan, machine) == [[""], ["7"]]


@pytest.mark.parametrize("framework", ["jax", "none", "tensorflow"])
def test_other_frameworks_see_the_gpus_of_their_host(tmp_path: Path, framework: str) -> None:
    text = (
        f"{{name: a, framework: {framework}, command: [python, train.py], gpus: 1, roles: {{worker: {{replicas: 2}}}}}}"
    )
    machine = {"worker-host-0": ("0",), "worker-host-1": ("1",)}
    assert visible_devices(plan_of(tmp_path, text), machine) == [["0"], ["1"]]


PET = ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT")


def test_torchrun_gets_one_task_per_host_and_defaults_for_one_world(tmp_path: Path) -> None:
    text = "{name: a, framework: torch, command: [torchrun, train.py], gpus: 4, roles: {worker: {replicas: 2}}}"
    job_plan = plan_of(tmp_path, text)
    assert [task.name for task in job_plan.tasks] == ["worker-0", "worker-1"]
    variables = variables_of(job_plan, "worker-1")
    assert [variables[name] for name in PET] == ["2", "1", "4", "10.0.0.0", "5000"]
    # torchrun counts LOCAL_RANK over its host, and so must the GPUs.
    machine = {"worker-host-0": ("0", "1", "2", "3"), "worker-host-1": ("4", "5", "6", "7")}
    assert visible_devices(job_plan, machine) == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]


def test_tasks_that_run_torchrun_themselves_form_one_world(tmp_path: Path) -> None:
    text = "{name: a, framework: torch, command: [sh, -c, torchrun train.py], gpus: 2, env: {PET_NPROC_PER_NODE: '3'}}"
    job_plan = plan_of(tmp_path, text)
    assert [[variables_of(job_plan, f"worker-{n}")[name] for name in PET[:3]] for n in range(2)] == [
        ["2", "0", "3"],
        ["2", "1", "3"],
    ]


def scoped(tmp_path: Path, scope: str, framework: str = "torch") -> plan.Plan:
    worker = "{replicas: 2, tasks_per_host: 2, gpus: 2}"
    text = f"{{name: a, framework: {framework}, command: [python, train.py], roles: {{worker: {worker}}}"
    return plan_of(tmp_path, f"{text}, restart: {{scope: {scope}}}}}")


GROUP_OF_TORCH = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", *LOCAL)


def test_torch_tasks_can_form_a_group_with_those_that_restart_with_them(tmp_path: Path) -> None:
    """Others would have to join it again."""
    machine = {"worker-host-0": ("0", "1"), "worker-host-1": ("2", "3")}

    def variables(scope: str) -> list[str]:
        environment = variables_of(scoped(tmp_path, scope), "worker-3", machine=machine)
        assert (environment["PACELINE_RANK"], environment["PACELINE_WORLD_SIZE"]) == ("3", "4")
        assert (environment["PACELINE_LOCAL_INDEX"], environment["PACELINE_LOCAL_WORLD_SIZE"]) == ("1", "2")
        return [environment[name] for name in GROUP_OF_TORCH]

    assert variables("group") == ["10.0.0.0", "5000", "3", "4", "3", "4", "0", "1"]
    assert variables("host") == ["10.0.0.2", "5002", "1", "2", "1", "2", "0", "1"]
    assert variables("task") == ["10.0.0.3", "5003", "0", "1", "0", "1", "0", "1"]


def test_the_local_rank_is_the_index_of_a_gpu_if_hosts_or_tasks_restart_on_their_own(tmp_path: Path) -> None:
    machine = {"worker-host-0": ("0", "1"), "worker-host-1": ("2", "3")}
    assert visible_devices(scoped(tmp_path, "host"), machine) == [["0", "1"], ["0", "1"], ["2", "3"], ["2", "3"]]
    assert visible_devices(scoped(tmp_path, "task"), machine) == [["0"], ["1"], ["2"], ["3"]]
    alone = plan_of(
        tmp_path,
        "{name: a, framework: torch, command: [python, train.py], gpus: 2, restart: {scope: task}, "
        "roles: {worker: {replicas: 2, tasks_per_host: 1}}}",
    )
    assert visible_devices(alone, machine) == [["0", "1"], ["2", "3"]]


def test_each_torchrun_forms_a_world_of_its_own_if_hosts_restart_on_their_own(tmp_path: Path) -> None:
    text = "{name: a, framework: torch, command: [torchrun, train.py], gpus: 4, roles: {worker: {replicas: 2}}"
    job_plan = plan_of(tmp_path, f"{text}, restart: {{scope: host}}}}")
    assert [variables_of(job_plan, "worker-1")[name] for name in PET] == ["1", "0", "4", "10.0.0.1", "5001"]


def test_tasks_of_any_program_know_the_addresses_of_all(tmp_path: Path) -> None:
    config = json.loads(variables_of(scoped(tmp_path, "task", "none"), "worker-3")["CLUSTER_CONFIG"])
    assert config == {"worker": [f"10.0.0.{n}:{5000 + n}" for n in range(4)]}


def test_jaxjob_variables_are_set_on_request(tmp_path: Path) -> None:
    text = "name: a\nframework: jax\ncommand: [python, train.py]\nroles: {worker: {replicas: 2}, evaluator: {}}\n"
    names = ("PROCESS_ID", "NUM_PROCESSES", "COORDINATOR_ADDRESS", "COORDINATOR_PORT")
    assert not set(names) & variables_of(plan_of(tmp_path, text), "worker-1").keys()
    job_plan = plan_of(tmp_path, text + "env_of: [jaxjob]\n")
    variables = variables_of(job_plan, "worker-1")
    assert [variables[name] for name in names] == ["1", "2", "10.0.0.0", "5000"]
    assert not set(names) & variables_of(job_plan, "evaluator-0").keys()


SHARES = ("PACELINE_SHARE", "PACELINE_SHARE_OFFSET", "PACELINE_SHARE_TOTAL")


def test_shares_are_counted_over_the_tasks_that_take_part(tmp_path: Path) -> None:
    groups = "[{replicas: 2, min: 1, share: 3, tasks_per_host: 2}, {replicas: 2, min: 1}]"
    text = f"{{name: a, framework: none, command: [python, train.py], roles: {{worker: {groups}, evaluator: {{}}}}}}"
    job_plan = plan_of(tmp_path, text)
    assert plan.from_data(plan.to_data(job_plan)) == job_plan

    def shares(generation: plan.Plan) -> list[list[str | None]]:
        variables = [variables_of(generation, task.name) for task in generation.tasks]
        return [[values.get(name) for name in SHARES] for values in variables]

    none = [None, None, None]  # of the evaluator
    assert shares(job_plan) == [
        ["3", "0", "14"], ["3", "3", "14"], ["3", "6", "14"], ["3", "9", "14"], ["1", "12", "14"], ["1", "13", "14"],
        none,
    ]  # fmt: skip
    smaller = job_plan.of_generation(["worker-2", "worker-3", "worker-5"])
    assert shares(smaller) == [["3", "0", "7"], ["3", "3", "7"], ["1", "6", "7"], none]


def test_without_shares_no_variable_is_set(tmp_path: Path) -> None:
    assert not variables_of(plan_of(tmp_path, MULTI_WORKER), "worker-0").keys() & set(SHARES)


def test_jax_gets_the_address_of_the_first_task(tmp_path: Path) -> None:
    job_plan = plan_of(
        tmp_path, "{name: a, framework: jax, command: [python, train.py], roles: {worker: {replicas: 2}}}"
    )
    variables = variables_of(job_plan, "worker-1")
    assert variables["PACELINE_JAX_COORDINATOR"] == "10.0.0.0:5000"
    assert (variables["PACELINE_RANK"], variables["PACELINE_WORLD_SIZE"]) == ("1", "2")


@pytest.mark.parametrize("framework", ["torch", "jax", "none"])
def test_an_evaluator_is_not_part_of_any_group(tmp_path: Path, framework: str) -> None:
    roles = "roles: {worker: {replicas: 2}, evaluator: {}}"
    job_plan = plan_of(tmp_path, f"{{name: a, framework: {framework}, command: [python, train.py], {roles}}}")
    variables = variables_of(job_plan, "evaluator-0")
    assert (variables["PACELINE_RANK"], variables["PACELINE_WORLD_SIZE"]) == ("-1", "2")
    assert not {"RANK", "MASTER_ADDR", "PACELINE_JAX_COORDINATOR"} & variables.keys()
    assert variables_of(job_plan, "worker-0").get("GROUP_WORLD_SIZE", "2") == "2"


@pytest.mark.parametrize(
    ("framework", "devices", "local", "visible"),
    [
        ("tensorflow", ("2", "3"), 1, "3"),
        ("torch", ("2", "3"), 1, "2,3"),
        ("jax", ("2", "3"), 1, "2,3"),
        ("tensorflow", (), 0, ""),
        ("none", (), 0, ""),
    ],
)
def test_gpus(tmp_path: Path, framework: str, devices: tuple[str, ...], local: int, visible: str) -> None:
    text = f"{{name: a, framework: {framework}, command: [python, train.py], roles: {{worker: {{tasks_per_host: 2}}}}}}"
    job_plan = plan_of(tmp_path, text)
    assert environment.gpus(job_plan, job_plan.tasks[local], devices)["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize(("cores", "tasks", "threads"), [(8, 2, "4"), (2, 3, "1"), (1.5, 1, "1"), (0.2, 1, "1")])
def test_each_task_gets_its_share_of_cores_as_threads(cores: float, tasks: int, threads: str) -> None:
    assert environment.threads(cores, tasks)["OMP_NUM_THREADS"] == threads


def test_generation_and_run_are_set(tmp_path: Path) -> None:
    variables = variables_of(plan_of(tmp_path, MULTI_WORKER), "worker-3", generation=7)
    assert (variables["PACELINE_GENERATION"], variables["PACELINE_RUN"]) == ("7", "run-1234")
