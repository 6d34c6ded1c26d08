"""The status of a run: its report, its tasks, and on a cluster its pods."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.client.json_form import versioned
from paceline.client.reading.find_run import Notify, ignore, refresh
from paceline.view.files.run_folders import Run
from paceline.view.snapshots.snapshot_locations import origin_of
from paceline.view.state import run_state, status_reader

if TYPE_CHECKING:
    from paceline.view.state.run_state import State
    from paceline.view.state.status_reader import Standing

PAGES = {"tensorboard": "tensorboard", "metrics": "metrics_url"}  # what the text calls them -> their key


@dataclass(frozen=True)
class TaskStatus:
    """One task of a run."""

    name: str
    """Its name, such as `worker-0`."""
    state: str
    """`waiting`, `starting`, `running`, `succeeded`, `failed` or `ended`; of an elastic job also `absent`."""
    host: str
    """The host that runs it; empty: none yet."""
    pid: int | None
    """Its process on its host; None: it is not running."""
    generation: int
    """The generation that started it."""
    step: int | None
    """The last step that it reported."""
    memory: int | None
    """Bytes of memory that it uses; None: unknown, or it is not running."""
    exit: str | None
    """How it ended, such as `exit 1` or `SIGKILL`."""
    metrics: dict[str, float | None]
    """The last value of each metric that it reported; None: NaN or infinite."""

    def to_dict(self) -> dict[str, Any]:
        """An item of `tasks` of `paceline status -o json`, with a `schema_version`."""
        fields = dict(vars(self))
        return versioned({"task": fields.pop("name"), **fields})


@dataclass(frozen=True)
class Status:
    """The status of a run at one moment."""

    run: str
    """The id of the run."""
    status: str
    """`starting`, `running`, `paused`, `succeeded`, `failed`, `stopped`, `abandoned` or `damaged`."""
    reason: str
    """Why it ended, or what it is waiting for."""
    cause: str | None
    """The kind of failure that ended it, such as `program-error`."""
    steps: int
    """The highest step that a task has reported."""
    generations: int
    """The number of the newest generation."""
    restarts: tuple[dict[str, Any], ...]
    """The restarts so far, oldest first, with their causes."""
    tasks: tuple[TaskStatus, ...]
    """Its tasks."""
    _form: dict[str, Any] = field(repr=False, compare=False)

    @property
    def is_running(self) -> bool:
        """Whether the run is starting, running or paused."""
        return self.status in run_state.LIVE

    @property
    def succeeded(self) -> bool:
        """Whether the run has ended successfully."""
        return self.status == "succeeded"

    def to_dict(self) -> dict[str, Any]:
        """The same as `paceline status -o json`."""
        return dict(self._form)

    def _repr_html_(self) -> str:
        from paceline.client.notebooks import html

        return html.of_status(self)


def read(run: Run, notify: Notify = ignore) -> Standing:
    """The state of the run, updated if it runs on a cluster."""
    refresh(run, notify=notify)
    return status_reader.read(run)


def status_of(standing: Standing) -> Status:
    form = json_form(standing)
    tasks = tuple(
        TaskStatus(
            each["task"], each["state"], each["host"], each["pid"], each["generation"], each["step"], each["memory"],
            each["exit"], each["metrics"],
        )
        for each in form["tasks"]
    )  # fmt: skip
    return Status(
        form["run"], str(form["status"]), str(form.get("reason") or ""), form.get("cause"),
        int(form.get("steps") or 0), int(form.get("generations") or 0), tuple(form.get("restarts") or ()), tasks, form,
    )  # fmt: skip


def json_form(standing: Standing) -> dict[str, Any]:
    """What `paceline status -o json` prints."""
    more: dict[str, Any] = {"from": origin_of(standing.folder) or None}
    more |= {key: url(standing, key) for key in PAGES.values()}
    more |= marks(standing)
    if on_cluster(standing):
        more |= {"pods": pods(standing), "reasons": pending_reasons(standing)}
    return versioned({**standing.report, "tasks": tasks(standing), "waiting": _waiting(standing.state), **more})


def report_form(report: dict[str, Any]) -> dict[str, Any]:
    """What `paceline run -o json` prints, and `paceline ls -o json` for each run."""
    return versioned(report)


def wait_form(standing: Standing) -> dict[str, Any]:
    """What `paceline wait -o json` prints."""
    return versioned({**standing.report, **marks(standing)})


def marks(standing: Standing) -> dict[str, Any]:
    newest = {"saved": standing.state.saved, "committed": standing.state.committed}
    return {name: mark and mark.to_json() for name, mark in newest.items()}


def _waiting(state: State) -> dict[str, Any] | None:
    if state.waiting is None:
        return None
    return {key: state.waiting.get(key) for key in ("missing", "since_s", "limit_s")}


def url(standing: Standing, key: str) -> str | None:
    """The URL of TensorBoard or of the metrics, which are served only as long as a run on this machine."""
    address = standing.info.get(key)
    return address if standing.alive and isinstance(address, str) else None


def on_cluster(standing: Standing) -> bool:
    return standing.info.get("on") == "kubernetes"


def pods(standing: Standing) -> list[dict[str, Any]]:
    from paceline.backends.kubernetes.runs.pod_records import load

    return load(standing.folder)


def pending_reasons(standing: Standing) -> list[str]:
    """Why a pod does not start, or is not created."""
    from paceline.backends.kubernetes.runs.pod_records import load_reasons

    return [str(reason) for reason in load_reasons(standing.folder)] if standing.alive else []


def tasks(standing: Standing) -> list[dict[str, Any]]:
    return [
        {
            "task": task.name, "state": task.state if standing.alive else _final_state(task.state), "host": task.host,
            "pid": task.pid if standing.alive else None, "generation": task.generation, "step": task.step,
            "memory": task.memory if standing.alive else None, "exit": task.exit or None, "metrics": task.metrics,
        }
        for task in standing.state.tasks.values()
    ]  # fmt: skip


def _final_state(state: str) -> str:
    """No task runs once the supervisor has exited, whatever its last event was."""
    return "ended" if state in ("starting", "running", "waiting") else state
