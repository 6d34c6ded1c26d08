"""`paceline tensorboard`: what tasks wrote for TensorBoard, in a browser of this machine."""

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

from paceline.cli.chosen import choose
from paceline.cli.options import ContextOption, NamespaceOption, OnOption, ReadArgument
from paceline.cli.say import fail, note, tell

if TYPE_CHECKING:
    from paceline.agent.loop import Loop
    from paceline.backends.kubernetes.cluster import Cluster
    from paceline.view.places import Source
    from paceline.view.runs import Run

USUAL_PORT = 6006
LIMIT_S = 600.0  # until it answers the first time: its image may be large
LOOK_S = 0.5
ANSWER_S = 10.0  # for the first bytes of a page
PATIENCE_S = 5.0  # until a person is told why it does not answer yet


def main(
    run: ReadArgument = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help=f"The local port; {USUAL_PORT}, or a free one.")
    ] = None,
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:
    """Show a run in TensorBoard, at an address of this machine, until Ctrl-C.

    A run on this machine, and one that has ended and keeps its files in a bucket, is shown by the tensorboard of your
    environment. A run on a cluster brings its own, with `tensorboard: true` in the job file: a local port leads there.
    """
    if port is not None and not 0 <= port <= 65535:
        fail(f"--port {port}: ports are 0 to 65535")
    from paceline.view import places, runs

    if run is not None and places.is_place(run):
        return _kept(places.at_place(run, note), port)
    found = choose(run, on, context, namespace)
    if not runs.on_cluster(found.folder):
        return _here(found, port)
    in_bucket = places.is_bucket(places.place_of(found))
    asked = (runs.read_object(found.folder / "plan.json") or {}).get("tensorboard")
    if not asked:
        if in_bucket:
            return _kept(places.of_run(found, note), port)
        fail(f"{found.name} has no TensorBoard: say `tensorboard: true` in the job file of the next run", 1)
    from paceline.backends.kubernetes.board import NoBoard
    from paceline.backends.kubernetes.cluster import Refused, Unreachable, connect

    info = runs.info(found.folder)
    # A browser hangs up when it likes; here that is no reason to end.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        return asyncio.run(_there(connect(info["context"], info["namespace"]), found.name, asked, port))
    except NoBoard as error:
        if not in_bucket:
            fail(str(error), 1)
    except (Refused, Unreachable):
        if not in_bucket:
            raise
    except KeyboardInterrupt:
        return 0
    return _kept(places.of_run(found, note), port)


def _here(found: Run, port: int | None) -> int:
    from paceline.view import runs

    folder = found.folder / "tensorboard"
    alive = runs.alive(found.folder)
    page = runs.info(found.folder).get("tensorboard")
    if alive and page and port is None:
        print(page, flush=True)
        tell(f"it runs beside {found.name}, and ends with it")
        return 0
    python = _python()
    if not folder.is_dir() or not any(folder.iterdir()):
        tell(f"note: nothing is in {folder} yet: tasks find it as PACELINE_TENSORBOARD_DIR")
    chosen = _free(port)
    if not alive:
        _become(python, folder, chosen)
    return _show(python, folder, chosen, lambda loop: None)


def _become(python: str, folder: Path, port: int) -> NoReturn:
    print(f"http://127.0.0.1:{port}/", flush=True)
    words = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port), "--reload_interval", "5"]
    os.execv(python, [python, "-m", "tensorboard.main", *words])


def _python() -> str:
    from paceline.agent.showing import with_tensorboard
    from paceline.backends.local.resources import interpreter

    python = interpreter()
    if not with_tensorboard([python]):
        fail(f"{python} has no tensorboard: pip install tensorboard, or activate an environment that has it", 1)
    return python


def _kept(source: Source, port: int | None) -> int:
    """What a run keeps in its bucket: copied to a folder that goes with this command."""
    from tempfile import TemporaryDirectory

    from paceline.storage.store import StoreError
    from paceline.view.curves import Fetched

    python = _python()
    with closing(source), TemporaryDirectory(prefix="paceline-") as place:
        folder = Path(place, "tensorboard")
        folder.mkdir()
        fetched = Fetched(source, folder)
        if not fetched.refresh():
            fail(f"{source.where} holds nothing for TensorBoard: tasks write it to PACELINE_TENSORBOARD_DIR", 1)

        def later(loop: Loop) -> None:
            if not fetched.over:
                loop.after(fetched.pause, lambda: again(loop))

        def again(loop: Loop) -> None:
            try:
                fetched.refresh()
            except StoreError as error:
                tell(f"note: shown as it was: {error}")
            later(loop)

        return _show(python, folder, _free(port), later)


def _show(python: str, folder: Path, port: int, begin: Callable[[Loop], None]) -> int:
    """Until Ctrl-C. `begin`: what else is to be done meanwhile."""
    from paceline.agent.loop import Loop
    from paceline.agent.showing import Showing

    def say(why: str) -> None:
        tell(f"note: TensorBoard ended ({why}) and is started again")

    loop = Loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.on_signal(number, loop.stop)
    print(f"http://127.0.0.1:{port}/", flush=True)
    showing = Showing(loop, python, str(folder), ("127.0.0.1", port), None, say)
    try:
        begin(loop)
        loop.run()
    finally:
        showing.close()
    return 0


def _free(port: int | None) -> int:
    import socket

    wanted = USUAL_PORT if port is None else port
    try:
        with socket.create_server(("127.0.0.1", wanted)) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        if port is None:
            return _free(0)
        fail(f"port {port} of 127.0.0.1 cannot be used: {os.strerror(error.errno or 0)}; give another with --port", 1)


async def _there(cluster: Cluster, run: str, asked: Any, port: int | None) -> int:
    from paceline.agent.options import PAGE_PORT
    from paceline.backends.kubernetes import board
    from paceline.backends.kubernetes.forward import Forward

    await asyncio.to_thread(board.wake, cluster, run)
    forward = Forward(cluster, PAGE_PORT, lambda: board.pod(cluster, run))
    async with forward.open(_free(port)) as opened:
        until = time.monotonic() + LIMIT_S
        shown, quiet = "", time.monotonic() + PATIENCE_S
        while not await _answers(opened):
            if time.monotonic() > until:
                fail(f"TensorBoard of {run} has not answered for {LIMIT_S:g} s: {shown or forward.trouble}", 1)
            reason = await asyncio.to_thread(board.why, cluster, run)
            if reason != shown and time.monotonic() > quiet:
                tell(f"note: waiting for TensorBoard: {reason}")
                shown = reason
            await asyncio.sleep(LOOK_S)
        print(f"http://127.0.0.1:{opened}/", flush=True)
        tell(f"TensorBoard of {run}; Ctrl-C ends this, not the run")
        if where := await asyncio.to_thread(board.published, cluster, run, asked):
            tell(where)
        await asyncio.Event().wait()
    return 0


async def _answers(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        return await asyncio.wait_for(reader.read(5), ANSWER_S) == b"HTTP/"
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()
