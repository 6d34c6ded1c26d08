"""Variables by which a program that logs to MLflow or Weights & Biases continues in the same run after a restart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from paceline.plan import Plan, Task

LONGEST_ID = 64  # characters of the id of a run of Weights & Biases


def tracking_variables(plan: Plan, task: Task, run: str, mlflow_run: str, given: Mapping[str, str]) -> dict[str, str]:
    """`mlflow_run`: its id; empty: none is known. `given`: the other variables of the task, which take precedence."""
    variables = {"WANDB_RUN_GROUP": run}
    if "WANDB_RUN_ID" not in given:
        variables.update(WANDB_RUN_ID=_short(f"{run}-{task.name}"), WANDB_RESUME="allow")
    if mlflow_run and plan.track is not None and task.name == plan.leading_task and "MLFLOW_RUN_ID" not in given:
        server = plan.track.mlflow
        if given.get("MLFLOW_TRACKING_URI", server).rstrip("/") == server.rstrip("/"):  # others do not know this run
            variables.update(MLFLOW_RUN_ID=mlflow_run, MLFLOW_TRACKING_URI=server)
    return {name: value for name, value in variables.items() if name not in given}


def _short(id: str) -> str:
    """
    >>> _short("digits-3f9a-worker-0"), len(_short(100 * "a"))
    ('digits-3f9a-worker-0', 64)
    """
    if len(id) <= LONGEST_ID:
        return id
    return f"{id[: LONGEST_ID - 9]}-{hashlib.sha256(id.encode()).hexdigest()[:8]}"
