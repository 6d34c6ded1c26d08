"""The run that a verb is about: one this machine knows, or one that is looked up on a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.say import fail, note, one_of, tell

if TYPE_CHECKING:
    from paceline.backends.kubernetes.cluster import Cluster
    from paceline.view.runs import Run


def choose(
    run: str | None, on: str = "", context: str | None = None, namespace: str | None = None, remaining: bool = False
) -> Run:
    """`remaining`: also a run of which only the snapshots are left."""
    from paceline.view import runs

    cluster = cluster_of(on, context, namespace)
    if cluster is None:
        try:
            return runs.find(run, remaining)
        except runs.NoRun as error:
            raise runs.NoRun(f"{error}, and --on kubernetes looks on a cluster" if run else str(error)) from None
    if run is None:
        fail("say which run: `paceline ls --on kubernetes` lists those there are")
    from paceline.backends.kubernetes.known import adopt

    return runs.Run(run, adopt(cluster, run))


def readable(run: str | None, on: str, context: str | None, namespace: str | None, follow: bool = False) -> Run:
    """For verbs that only read: also a run that is written with its place, and that this machine need not know."""
    from paceline.view import places

    if run is None or not places.is_place(run):
        return choose(run, on, context, namespace)
    if follow:
        fail(f"{run} is read at its place, as far as it is there; follow a run by its id")
    import atexit
    import signal
    from contextlib import closing
    from tempfile import TemporaryDirectory

    from paceline.view import kept, runs

    with closing(places.at_place(run, note)) as source:
        folder = TemporaryDirectory(prefix="paceline-")
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # its end would leave the folder behind
        atexit.register(folder.cleanup)
        kept.look_at(source, Path(folder.name))
        return runs.Run(source.run, Path(folder.name))


def cluster_of(on: str, context: str | None, namespace: str | None) -> Cluster | None:
    """The cluster that a person has asked for; None where it is this machine."""
    one_of(on, ("local", "kubernetes"), "--on")
    if on != "kubernetes":
        if context or namespace:
            fail("--context and --namespace are for --on kubernetes")
        return None
    from paceline.backends.kubernetes.cluster import connect

    return connect(context, namespace)


def refresh(folder: Path, hosts: Iterable[str] = ()) -> None:
    """A run on a cluster is looked up before it is shown; where the cluster is away, it is shown as last seen.

    `hosts`: those whose output is wanted, too.
    """
    from paceline.view import runs

    if runs.at_place(folder) and hosts:
        from contextlib import closing

        from paceline.view import kept, places

        with closing(places.at_place(runs.info(folder)["where"], note)) as source:
            kept.bring(source.kept, folder, hosts)
    ended = runs.deleted(folder) or (runs.outcome_known(folder) and not hosts)
    if ended or not runs.on_cluster(folder):
        return
    from paceline.backends.kubernetes import known
    from paceline.backends.kubernetes.cluster import Refused, Unreachable
    from paceline.storage.manifest import Damaged, Newer
    from paceline.storage.store import StoreError

    try:
        known.refresh(folder, set(hosts))
    except (Refused, Unreachable, StoreError, Damaged, Newer) as error:
        tell(f"note: {folder.name} is shown as it was last seen: {error}")
