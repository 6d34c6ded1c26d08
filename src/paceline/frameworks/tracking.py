"""Variables by which a program that logs to MLflow or Weights & Biases continues in the same run after a restart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from paceline.plan import Plan, Task

LONGEST_ID = 64  # characters of the id of a run of Weights & Biases


def tracking_variables(plan: Plan, task: Task, run: str, mlflow_run: str, own: Mapping[str, str]) -> dict[str, str]:
    """`mlflow_run`: the id of the run; empty: unknown. `own`: other variables of the task, which take precedence."""
    variables = {"WANDB_RUN_GROUP": run}
    if "WANDB_RUN_ID" not in own:
        variables.update(WANDB_RUN_ID=_short(f"{run}-{task.name}"), WANDB_RESUME="allow")
    if mlflow_run and plan.track is not None and task.name == plan.leading_task and "MLFLOW_RUN_ID" not in own:
        server = plan.track.mlflow
        if own.get("MLFLOW_TRACKING_URI", server).rstrip("/") == server.rstrip("/"):  # others do not know this run
            variables.update(MLFLOW_RUN_ID=mlflow_run, MLFLOW_TRACKING_URI=server)
    return {name: value for name, value in variables.items() if name not in own}


def _short(id: str) -> str:
    """
    >>> _short("digits-3f9a-worker-0"), len(_short(100 * "a"))
    ('digits-3f9a-worker-0', 64)
    """
    if len(id) <= LONGEST_ID:
        return id
    return f"{id[: LONGEST_ID - 9]}-{hashlib.sha256(id.encode()).hexdigest()[:8]}"
