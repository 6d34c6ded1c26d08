"""A run of Paceline is one run of MLflow, with each number once, whatever is killed; programs are told its id."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from support.mlflow_servers import fake_server, real_server
from support.runs import Run, Starter, eventually, job, kill, orders


def variables(run: Run, task: str = "worker-0") -> dict[str, str]:
    environ = psutil.Process(run.task(task)).environ()
    return {name: value for name, value in environ.items() if name.startswith(("MLFLOW_", "WANDB_"))}


def finish(state: Path) -> None:
    """The tasks end after their next step. They may read the file at any moment: it is whole from the start."""
    (state / "finish.partial").write_text("0")
    (state / "finish.partial").rename(state / "finish")


def restart(run: Run, generation: int) -> None:
    """Kills a task and the captain."""
    before = len(run.events("captain-returned"))
    kill(run.agent("captain"))
    eventually("the captain is back", lambda: len(run.events("captain-returned")) > before, more=run.story)
    kill(run.task("worker-0"))
    run.wait_for_step(generation=generation, task="worker-0")


def test_a_run_is_one_run_of_mlflow_whatever_is_killed(start: Starter, state: Path) -> None:
    with fake_server() as server:
        server.failures = [503]  # the tasks wait until it answers
        fields = job(orders("none", state), workers=2, track={"mlflow": server.url}, restart={"warm": False})
        run = start(fields, "--set", "env.SEED=7", env={"WANDB_RUN_GROUP": "mine"})
        run.all_step()
        mlflow = {"MLFLOW_RUN_ID": "run0", "MLFLOW_TRACKING_URI": server.url}
        wandb = {"WANDB_RUN_GROUP": "mine", "WANDB_RESUME": "allow"}
        expected = {**mlflow, **wandb, "WANDB_RUN_ID": f"{run.folder.name}-worker-0"}
        assert variables(run) == expected
        assert variables(run, "worker-1") == {**wandb, "WANDB_RUN_ID": f"{run.folder.name}-worker-1"}
        restart(run, 2)
        assert variables(run) == expected
        finish(state)
        run.succeeds()
        (server_run,) = server.runs
        assert (server_run["run_name"], server_run["status"], server_run["params"]["env.SEED"]) == (
            run.folder.name,
            "FINISHED",
            "7",
        )
        steps = [step for step, _ in server.points("loss")]
        reported = {event["step"] for event in run.events("step") if event["task"] == "worker-0"}
        assert steps == sorted(reported), "each once, although a restart trains some of them again"
        assert all(value == 1 / step for step, value in server.points("loss"))


@pytest.mark.long
@pytest.mark.timeout(700)  # the first time, MLflow is installed
def test_with_a_real_server(start: Starter, state: Path, tmp_path: Path) -> None:
    (tmp_path / "mlflow").mkdir()
    with real_server(tmp_path / "mlflow") as server:
        track = {"mlflow": server.url, "experiment": "digits recognition"}
        run = start(job(orders("none", state), workers=1, track=track))
        run.all_step()
        id = variables(run)["MLFLOW_RUN_ID"]
        restart(run, 2)
        server.process.send_signal(signal.SIGSTOP)
        finish(state)
        run.wait("run-ended")
        server.process.send_signal(signal.SIGCONT)
        run.succeeds(120)
        server_run = server.get("runs/get", run_id=id)["run"]
        assert (server_run["info"]["status"], server_run["info"]["run_name"]) == ("FINISHED", run.folder.name)
        assert {"key": "roles.worker.replicas", "value": "1"} in server_run["data"]["params"]
        assert {"key": "paceline.status", "value": "succeeded"} in server_run["data"]["tags"]
        history = server.get("metrics/get-history", run_id=id, metric_key="loss", max_results="10000")["metrics"]
        steps = [point["step"] for point in history]
        assert sorted(steps) == sorted({event["step"] for event in run.events("step")})
