"""The run whose snapshots a verb reads, the one that is meant, and how far reading is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.chosen import choose, refresh
from paceline.cli.options import complete_runs
from paceline.cli.say import fail, note

if TYPE_CHECKING:
    from paceline.storage.manifest import Id, Manifest
    from paceline.storage.snapshots import Known
    from paceline.storage.store import Wanted
    from paceline.view.places import Source
    from paceline.view.programs import Program
    from paceline.view.restored import Held

RUN_HELP = (
    "A run's id or its beginning, the newest if left out; or s3://bucket/path/RUN, claim://name/path/RUN, /folder/RUN."
)
SNAPSHOT_HELP = (
    "step-120-g3; or step-120, or 120, where there is one of that step; newest; or best. The newest if left out."
)

Where = Annotated[
    str | None, typer.Argument(metavar="RUN", help=RUN_HELP, show_default=False, autocompletion=complete_runs)
]
SnapshotOption = Annotated[
    str | None, typer.Option("--snapshot", metavar="SNAPSHOT", help=SNAPSHOT_HELP, show_default=False)
]
JobOption = Annotated[
    str, typer.Option("--job", metavar="FILE", help="A job file that has the command; that of the run if left out.")
]
CodeOption = Annotated[
    str, typer.Option("--code", metavar="DIR", help="The folder that it runs in; the job's own if left out.")
]
_REDRAW_S = 0.1


@contextmanager
def opened(run: str | None, on: str, context: str | None, namespace: str | None) -> Iterator[Source]:
    source = found(run, on, context, namespace)
    try:
        yield source
    finally:
        source.close()


def found(run: str | None, on: str, context: str | None, namespace: str | None) -> Source:
    from paceline.view import places, runs

    if run is not None and places.is_place(run):
        if on or context or namespace:
            fail(f"{run} is a place: --on, --context and --namespace are for ids of runs")
        return places.at_place(run, note)
    try:
        found = choose(run, on, context, namespace, remaining=True)
    except runs.NoRun as error:
        from paceline.storage.manifest import parse_id

        if run is None or parse_id(run) is None:
            raise
        raise runs.NoRun(f"{run} is a snapshot, and the run comes first: RUN {run} ({error})") from None
    refresh(found.folder)
    return places.of_run(found, note)


def meant(source: Source, known: Known, written: str | None) -> Id:
    from paceline.view import snapshots

    return snapshots.newest(source, known) if written is None else snapshots.find(source, known, written)


@contextmanager
def restored(
    run: str | None,
    snapshot: str | None,
    on: str,
    context: str | None,
    namespace: str | None,
    find: Callable[[Source], Program],
) -> Iterator[tuple[Program, Held, Manifest]]:
    """The program that is found for the run, and the snapshot that it is run with, in a folder here."""
    from paceline.view.restored import hold

    with opened(run, on, context, namespace) as source:
        program = find(source)  # first: nothing is fetched for a program that is not there
        made = source.reader.manifest(meant(source, source.reader.known(), snapshot))
        amount = sum(file.size for _, file in made.files().values())
        with ended_like_ctrl_c(), progress(str(made.id), amount) as still:
            held = hold(source, made, still)
    try:
        yield program, held, made
    finally:
        held.close()


# ---- while it takes its time


@contextmanager
def progress(what: str, total: int) -> Iterator[Wanted]:
    """How far it is, where somebody looks."""
    from paceline.view.terminal import Screen
    from paceline.view.words import size

    screen = Screen(sys.stderr)
    done, drawn = 0, -_REDRAW_S

    def still(more: int) -> bool:
        nonlocal done, drawn
        done += more
        now = time.monotonic()
        if screen.live and now - drawn >= _REDRAW_S:
            drawn = now
            screen.show([], [f"{what}: {size(done)} of {size(total)}"])
        return True

    try:
        yield still
    finally:
        screen.show([], [])


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Other ways to end a program leave nothing half, either."""
    import signal

    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
