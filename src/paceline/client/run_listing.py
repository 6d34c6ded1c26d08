"""Lists runs, newest first: those known to this machine, or all in a namespace of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, overload

from paceline.client.reading.find_run import Notify, Target, ignore, refresh_all
from paceline.client.reading.run_status import report_form
from paceline.client.run import Run
from paceline.view.files import run_folders
from paceline.view.state import status_reader


def known(notify: Notify = ignore, endpoint: str = "") -> list[tuple[run_folders.Run, dict[str, Any]]]:
    """The runs known to this machine, each with what `paceline ls -o json` prints."""
    runs = [replace(run, endpoint=endpoint) for run in run_folders.all_runs()]
    refresh_all([run for run in runs if run_folders.on_cluster(run.folder)], notify)
    return [(run, report_form(status_reader.summary(run))) for run in runs]


def on_cluster(target: Target) -> list[dict[str, Any]]:
    """What `paceline ls --on kubernetes -o json` prints."""
    from paceline.backends.kubernetes.runs.listing import list_runs

    with closing(target.cluster()) as cluster:
        return [report_form(report) for report in list_runs(cluster)]


class RunList(Sequence[Run]):
    """Runs, newest first."""

    def __init__(self, runs: Sequence[Run], reports: Sequence[dict[str, Any]]) -> None:
        self._runs, self._reports = tuple(runs), tuple(reports)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> RunList: ...
    def __getitem__(self, index: int | slice) -> Run | RunList:
        if isinstance(index, slice):
            return RunList(self._runs[index], self._reports[index])
        return self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self._runs))}]"

    def to_dict(self) -> list[dict[str, Any]]:
        """The same as `paceline ls -o json`: the state of the runs when they were listed."""
        return [dict(report) for report in self._reports]

    def _repr_html_(self) -> str:
        from paceline.client.notebooks import html

        return html.of_list(self._reports)


def runs(on: str = "local", context: str | None = None, namespace: str | None = None, *, endpoint: str = "") -> RunList:
    """The runs known to this machine, here and on clusters. `on="kubernetes"`: all runs in a namespace, of all users.

    `context`, `namespace`: of the cluster, as for kubectl. `endpoint`: the server of the buckets of these runs.
    """
    target = Target(on, context, namespace, endpoint=endpoint).resolved()
    if target.is_cluster:
        reports = on_cluster(target)
        return RunList([Run(str(report["run"]), target) for report in reports], reports)
    listed = known(endpoint=endpoint)
    return RunList([Run(run.name, target, run.folder) for run, _ in listed], [report for _, report in listed])


def get(
    run: str | None = None,
    on: str = "local",
    context: str | None = None,
    namespace: str | None = None,
    *,
    endpoint: str = "",
) -> Run:
    """A run by its id or a unique prefix of it; without an id: the newest run on this machine.

    `on="kubernetes"` searches a cluster, which also finds other users' runs. `endpoint`: the server of the run's
    bucket; default: that of your environment or of your own job. Your credentials are sent there. Raises `NoRun`.
    """
    from paceline.client.reading.find_run import find_run

    target = Target(on, context, namespace, endpoint=endpoint)
    target = target if run is None else target.resolved()
    record = find_run(run, target)
    return Run(record.name, target, folder=record.folder)
