"""`paceline tensorboard`: opens a run in TensorBoard on a local port."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from paceline.cli.options import (
    ContextOption,
    EndpointOption,
    NamespaceOption,
    OnOption,
    TensorBoardArgument,
)
from paceline.cli.output import fail, note, tell

if TYPE_CHECKING:
    from paceline.agent.net.loop import Loop
    from paceline.backends.kubernetes.api.cluster import Cluster
    from paceline.view.files.run_folders import Run
    from paceline.view.snapshots.snapshot_locations import Source

DEFAULT_PORT = 6006
START_TIMEOUT_S = 600.0  # seconds until TensorBoard first responds: its image may be large
POLL_S = 0.5
RESPONSE_TIMEOUT_S = 10.0  # seconds for the first bytes of a page
QUIET_S = 5.0  # seconds before the user is told why TensorBoard does not respond yet


def main(
    run: TensorBoardArgument = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help=f"Local port (default: {DEFAULT_PORT}, or a free one).")
    ] = None,
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
) -> int:
    """Open a run in TensorBoard on a local port, until Ctrl-C.

    For a run on this machine, or a run that keeps its files in a bucket, this starts the `tensorboard` that is
    installed in your environment. For a run on a cluster with `tensorboard: true` in its job file, it forwards the
    local port to the TensorBoard of the run.
    """
    if port is not None and not 0 <= port <= 65535:
        fail("invalid port", where=f"--port {port}", remedy="use 0 to 65535")
    from paceline.client.reading.find_run import Target, find_run
    from paceline.client.snapshots import run_store
    from paceline.storage.stores.locations import is_bucket
    from paceline.view.files import run_files, run_folders
    from paceline.view.snapshots import snapshot_locations

    if run is not None and snapshot_locations.is_location(run):
        return _show_stored(run_store.open_location(run, note, endpoint), port)
    target = find_run(run, Target(on, context, namespace, endpoint=endpoint))
    if not run_folders.on_cluster(target.folder):
        return _show_local(target, port)
    in_bucket = is_bucket(snapshot_locations.location_of(target))
    section = run_files.planned(target.folder).get("tensorboard")
    if not section:
        if in_bucket:
            return _show_stored(run_store.open_run(target, note), port)
        fail(f"{target.name} has no TensorBoard", 1, remedy="set `tensorboard: true` in the job file of the next run")
    from paceline.backends.kubernetes.api.cluster import Refused, Unreachable
    from paceline.backends.kubernetes.runs.local_folder import connect_for
    from paceline.backends.kubernetes.runs.tensorboard import NoTensorBoard

    # A browser may close its connection at any time: that must not end this process.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        return asyncio.run(_forward_port(connect_for(target.folder), target.name, section, port))
    except NoTensorBoard as error:
        if not in_bucket:
            fail(str(error), 1)
    except (Refused, Unreachable):
        if not in_bucket:
            raise
    except KeyboardInterrupt:
        return 0
    return _show_stored(run_store.open_run(target, note), port)


def _show_local(target: Run, port: int | None) -> int:
    from paceline.view.files import run_folders

    folder = target.folder / "tensorboard"
    alive = run_folders.alive(target.folder)
    page = run_folders.info(target.folder).get("tensorboard")
    if alive and page and port is None:
        print(page, flush=True)
        tell(f"TensorBoard is part of run {target.name} and stops when the run ends")
        return 0
    python = _python()
    if not folder.is_dir() or not any(folder.iterdir()):
        note(f"{folder} is still empty: tasks must write to the folder in PACELINE_TENSORBOARD_DIR")
    free_port = _free_port(port)
    if not alive:
        _exec_tensorboard(python, folder, free_port)
    return _run_server(python, folder, free_port, lambda loop: None)


def _exec_tensorboard(python: str, folder: Path, port: int) -> NoReturn:
    from paceline.frameworks.python_start import module_command

    print(f"http://127.0.0.1:{port}/", flush=True)
    arguments = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port), "--reload_interval", "5"]
    os.execv(python, module_command(python, "tensorboard.main", *arguments))


def _python() -> str:
    from paceline.agent.tensorboard.server import with_tensorboard
    from paceline.backends.local.host_shares import interpreter

    python = interpreter()
    if not with_tensorboard([python]):
        remedy = "install it in this environment, or activate one that has it"
        fail(f"tensorboard is not installed for {python}", 1, remedy=remedy)
    return python


def _show_stored(source: Source, port: int | None) -> int:
    """Shows the files in the run's bucket, copied to a temporary folder."""
    from tempfile import TemporaryDirectory

    from paceline.client.reading.event_file_copy import EventFileCopy
    from paceline.storage.stores.protocol import StoreError

    python = _python()
    with closing(source), TemporaryDirectory(prefix="paceline-") as scratch:
        folder = Path(scratch, "tensorboard")
        folder.mkdir()
        copy = EventFileCopy(source, folder)
        if not copy.refresh():
            remedy = "tasks must write to the folder in PACELINE_TENSORBOARD_DIR"
            fail(f"{source.address} has no TensorBoard files", 1, remedy=remedy)

        def schedule(loop: Loop) -> None:
            if not copy.is_complete:
                loop.after(copy.interval, lambda: refresh(loop))

        def refresh(loop: Loop) -> None:
            try:
                copy.refresh()
            except StoreError as error:
                note(f"not refreshed: {error}")
            schedule(loop)

        return _run_server(python, folder, _free_port(port), schedule)


def _run_server(python: str, folder: Path, port: int, on_start: Callable[[Loop], None]) -> int:
    """Runs TensorBoard until Ctrl-C. `on_start` may schedule other work on the loop."""
    from paceline.agent.net.loop import Loop
    from paceline.agent.tensorboard.server import TensorBoardServer

    def report_restart(reason: str) -> None:
        note(f"TensorBoard ended ({reason}) and is being restarted")

    loop = Loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.on_signal(number, loop.stop)
    print(f"http://127.0.0.1:{port}/", flush=True)
    server = TensorBoardServer(loop, python, str(folder), ("127.0.0.1", port), None, report_restart)
    try:
        on_start(loop)
        loop.run()
    finally:
        server.close()
    return 0


def _free_port(port: int | None) -> int:
    """The port if it can be used; without one, the default port or any free one."""
    import socket

    try:
        with socket.create_server(("127.0.0.1", DEFAULT_PORT if port is None else port)) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        if port is None:
            return _free_port(0)
        reason = os.strerror(error.errno or 0)
        fail(f"cannot use port {port} of 127.0.0.1: {reason}", 1, remedy="choose another with --port")


async def _forward_port(cluster: Cluster, run: str, section: Any, port: int | None) -> int:
    from paceline.agent.options import PAGE_PORT
    from paceline.backends.kubernetes.api.port_forward import Forward
    from paceline.backends.kubernetes.runs import tensorboard

    await asyncio.to_thread(tensorboard.ensure_started, cluster, run)
    forward = Forward(cluster, PAGE_PORT, lambda: tensorboard.pod(cluster, run))
    async with forward.open(_free_port(port)) as local_port:
        deadline = time.monotonic() + START_TIMEOUT_S
        reported, quiet_until = "", time.monotonic() + QUIET_S
        while not await _answers(local_port):
            if time.monotonic() > deadline:
                reason = reported or forward.trouble
                fail(f"TensorBoard of {run} did not respond within {START_TIMEOUT_S:g} s: {reason}", 1)
            reason = await asyncio.to_thread(tensorboard.why, cluster, run)
            if reason != reported and time.monotonic() > quiet_until:
                note(f"waiting for TensorBoard: {reason}")
                reported = reason
            await asyncio.sleep(POLL_S)
        print(f"http://127.0.0.1:{local_port}/", flush=True)
        tell(f"TensorBoard of {run}; press Ctrl-C to quit, the run continues")
        if published := await asyncio.to_thread(tensorboard.published, cluster, run, section):
            tell(published)
        await asyncio.Event().wait()
    return 0


async def _answers(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        return await asyncio.wait_for(reader.read(5), RESPONSE_TIMEOUT_S) == b"HTTP/"
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()
