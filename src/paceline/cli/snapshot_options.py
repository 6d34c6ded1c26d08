"""Options of commands that read snapshots, and progress display."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import complete_runs
from paceline.cli.output import note

if TYPE_CHECKING:
    from paceline.client.models.job_programs import Program
    from paceline.client.snapshots.restored_snapshots import RestoredSnapshot
    from paceline.storage.snapshots.manifest import Manifest
    from paceline.storage.stores.protocol import ContinueCheck
    from paceline.view.snapshots.snapshot_locations import Source

LOCATION_HELP = "or the location of its snapshots: s3://bucket/path/RUN, claim://name/path/RUN or /folder/RUN."
RUN_HELP = f"Run id or a unique prefix of it (default: the newest run), {LOCATION_HELP}"
SNAPSHOT_HELP = "step-120-g3; step-120 or 120 if only one snapshot has that step; newest; or best (default: newest)."

RunOrLocation = Annotated[
    str | None, typer.Argument(metavar="RUN", help=RUN_HELP, show_default=False, autocompletion=complete_runs)
]
SnapshotOption = Annotated[
    str | None, typer.Option("--snapshot", metavar="SNAPSHOT", help=SNAPSHOT_HELP, show_default=False)
]
JobOption = Annotated[
    str, typer.Option("--job", metavar="FILE", help="Job file with the command (default: the run's job).")
]
CodeOption = Annotated[
    str, typer.Option("--code", metavar="DIR", help="Folder to run the command in (default: the job's code folder).")
]
_REDRAW_S = 0.1


@contextmanager
def opened(run: str | None, on: str, context: str | None, namespace: str | None, endpoint: str) -> Iterator[Source]:
    from paceline.client.reading.find_run import Target
    from paceline.client.snapshots import snapshot_lookup as snapshots

    with snapshots.opened(run, Target(on, context, namespace, endpoint=endpoint), note) as source:
        yield source


@contextmanager
def restored(
    run: str | None,
    snapshot: str | None,
    on: str,
    context: str | None,
    namespace: str | None,
    endpoint: str,
    find: Callable[[Source], Program],
) -> Iterator[tuple[Program, RestoredSnapshot, Manifest]]:
    """Yields the program that `find` returns for the run, and a snapshot restored to a local folder."""
    from paceline.client.snapshots import snapshot_lookup as snapshots

    with ExitStack() as stack:
        with opened(run, on, context, namespace, endpoint) as source, interrupt_on_signals(), ExitStack() as display:
            program = find(source)  # first: fetch nothing if there is no program

            def show(manifest: Manifest) -> ContinueCheck:
                amount = sum(file.size for _, file in manifest.files().values())
                return display.enter_context(progress(str(manifest.id), amount))

            restored_snapshot, manifest = stack.enter_context(snapshots.restored(source, snapshot, show))
        yield program, restored_snapshot, manifest


@contextmanager
def progress(label: str, total: int) -> Iterator[ContinueCheck]:
    """Shows how many bytes were transferred, on a terminal."""
    from paceline.view.text.terminal import Screen
    from paceline.view.text.wording import size

    screen = Screen(sys.stderr)
    transferred, drawn_at = 0, -_REDRAW_S

    def advance(more: int) -> bool:
        nonlocal transferred, drawn_at
        transferred += more
        now = time.monotonic()
        if screen.live and now - drawn_at >= _REDRAW_S:
            drawn_at = now
            screen.show([], [f"{label}: {size(transferred)} of {size(total)}"])
        return True

    try:
        yield advance
    finally:
        screen.show([], [])


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that clean-up runs."""
    import signal

    previous = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
