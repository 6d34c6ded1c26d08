"""Finds runs: on this machine, on a cluster, or by the location of their snapshots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from paceline.errors import Argument, Call, PacelineError, UsageError, parts_of
from paceline.view.files import run_folders, run_lookup
from paceline.view.files.run_files import DamagedRun, NewerRun
from paceline.view.files.run_folders import NoRun, Run
from paceline.view.snapshots import store_settings
from paceline.view.snapshots.snapshot_locations import is_location

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.cluster import Cluster
    from paceline.view.snapshots.snapshot_locations import Source

Notify = Callable[[str | PacelineError], None]
ON_CLUSTER = Argument("on", "kubernetes")


def ignore(text: str | PacelineError) -> None:
    """Drops notes."""


@dataclass(frozen=True)
class Target:
    """Where to look for a run: on this machine, or on a cluster."""

    on: str = ""  # "kubernetes", "local", or "" if omitted
    context: str | None = None
    namespace: str | None = None
    kubeconfig: tuple[Path, ...] = ()  # its files; empty: those that KUBECONFIG names
    endpoint: str = ""  # the server of the run's bucket; empty: that of its job or the environment

    def __post_init__(self) -> None:
        if self.on not in ("", "local", "kubernetes"):
            raise UsageError("invalid value", where=Argument("on", self.on), remedy="use one of local, kubernetes")
        if not self.is_cluster and (self.context or self.namespace):
            cluster = Argument("context", self.context) if self.context else Argument("namespace", self.namespace)
            raise UsageError("is only for runs on a cluster", where=cluster, remedy=("use ", ON_CLUSTER))
        store_settings.check_endpoint(self.endpoint)

    @property
    def is_cluster(self) -> bool:
        return self.on == "kubernetes"

    @property
    def is_given(self) -> bool:
        return bool(self.on or self.context or self.namespace)

    def cluster(self, until: float = math.inf) -> Cluster:
        """`until`: a time of time.monotonic(), at which all requests end."""
        from paceline.backends.kubernetes.api.cluster import connect

        return connect(self.context, self.namespace, self.kubeconfig, until)

    def resolved(self) -> Target:
        """The same cluster, whatever KUBECONFIG and the current context are later. Sends no request."""
        if not self.is_cluster:
            return self
        with closing(self.cluster()) as cluster:
            return Target(self.on, cluster.context, cluster.namespace, cluster.kubeconfig, self.endpoint)


HERE = Target()


def find_run(run: str | None, target: Target = HERE, also_deleted: bool = False, until: float = math.inf) -> Run:
    """`run`: its id or a unique prefix of it; None: the newest. `also_deleted`: also find a deleted run whose snapshots
    were kept. `until`: a time of time.monotonic(), at which requests to a cluster end."""
    if not target.is_cluster:
        try:
            return replace(run_lookup.find(run, also_deleted), endpoint=target.endpoint)
        except NoRun as error:
            if not run:
                raise
            advice = parts_of(error.remedy_text)
            remedy = (*advice, *(["; "] if advice else []), ON_CLUSTER, " searches a cluster")
            raise NoRun(error.what, where=error.where_text, remedy=remedy) from None
    if run is None:
        runs = Call("runs", arguments=(ON_CLUSTER,))
        raise UsageError("a run id is required", where=ON_CLUSTER, remedy=("`", runs, "` lists the runs"))
    from paceline.backends.kubernetes.runs.local_folder import adopt

    with closing(target.cluster(until)) as cluster:
        return Run(run, adopt(cluster, run), target.endpoint)


@contextmanager
def readable_run(run: str | None, target: Target = HERE, notify: Notify = ignore) -> Iterator[Run]:
    """`run`: also the location of the snapshots of a run unknown to this machine. Its files are then copied into a
    temporary folder."""
    if run is None or not is_location(run):
        yield find_run(run, target)
        return
    from paceline.backends import archive_import
    from paceline.client.snapshots import run_store

    with (
        closing(run_store.open_location(run, notify, target.endpoint)) as source,
        TemporaryDirectory(prefix="paceline-") as folder,
    ):
        archive_import.import_run(source, Path(folder))
        yield Run(source.run, Path(folder), target.endpoint)


def find_source(run: str | None, target: Target = HERE, notify: Notify = ignore) -> Source:
    """The snapshots of a run. `run`: an id, or the location of its snapshots."""
    from paceline.client.snapshots import run_store

    if run is not None and is_location(run):
        if target.is_given:
            raise UsageError("runs on a cluster are found by id, not by location", where=run)
        return run_store.open_location(run, notify, target.endpoint)
    try:
        known_run = find_run(run, target, also_deleted=True)
    except NoRun as error:
        from paceline.storage.snapshots.manifest import parse_id

        if run is None or parse_id(run) is None:
            raise
        remedy = f"put the run id before the snapshot: RUN {run}"
        raise NoRun(f"{run} is a snapshot, not a run ({error.what})", remedy=remedy) from None
    refresh(known_run, notify=notify)
    return run_store.open_run(known_run, notify)


def refresh(run: Run, hosts: Iterable[str] = (), notify: Notify = ignore, until: float = math.inf) -> None:
    """Updates the local folder of a run on a cluster. If the cluster is unreachable, `notify` is called and the folder
    keeps its last known state. `hosts`: also fetch the output of these hosts. `until`: a time of time.monotonic(), at
    which all requests end."""
    folder = run.folder
    if run_folders.at_location(folder) and hosts:
        from paceline.backends import archive_import
        from paceline.client.snapshots import run_store

        with closing(run_store.open_location(run_folders.info(folder)["where"], notify, run.endpoint)) as source:
            try:
                archive_import.import_hosts(source.archive, folder, hosts, until=until)
            except archive_import.TooLarge as error:
                notify(str(error))
    is_final = run_folders.deleted(folder) or (run_folders.outcome_known(folder) and not hosts)
    if is_final or not run_folders.on_cluster(folder):
        return
    from paceline.backends.kubernetes.api.cluster import Refused, Unreachable
    from paceline.backends.kubernetes.runs import local_folder
    from paceline.storage.snapshots.manifest import Damaged, Newer
    from paceline.storage.stores.protocol import StoreError

    try:
        local_folder.refresh(run, set(hosts), until)
    except (Refused, Unreachable, StoreError, Damaged, Newer, DamagedRun, NewerRun) as error:
        notify(error.after(f"{folder.name} is shown in its last known state"))


def refresh_all(runs: Iterable[Run], notify: Notify = ignore) -> None:
    """Refreshes the runs that had not ended when last refreshed, a few at a time."""
    stale = [run for run in runs if not (run.folder / "report.json").exists()]
    if stale:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda run: refresh(run, notify=notify), stale))
