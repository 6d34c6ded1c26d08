"""`paceline tensorboard`: what tasks wrote for TensorBoard, in a browser of this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from paceline.cli.chosen import choose
from paceline.cli.options import ContextOption, NamespaceOption, OnOption, RunArgument
from paceline.cli.say import fail, tell

if TYPE_CHECKING:
    from paceline.backends.kubernetes.cluster import Cluster

USUAL_PORT = 6006
LIMIT_S = 600.0  # until it answers the first time: its image may be large
LOOK_S = 0.5
ANSWER_S = 10.0  # for the first bytes of a page
PATIENCE_S = 5.0  # until a person is told why it does not answer yet


def main(
    run: RunArgument = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help=f"The local port; {USUAL_PORT}, or a free one.")
    ] = None,
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:
    """Show a run in TensorBoard, at an address of this machine, until Ctrl-C.

    A run on this machine is shown by the tensorboard of your environment. A run on a cluster brings its own, with
    `tensorboard: true` in the job file: a local port leads there.
    """
    from paceline.view import runs

    if port is not None and not 0 <= port < 65536:
        fail(f"--port {port}: a port is at most 65535")
    found = choose(run, on, context, namespace)
    if not runs.on_cluster(found.folder):
        _here(found.folder / "tensorboard", port)
    if not (runs.read_object(found.folder / "plan.json") or {}).get("tensorboard"):
        fail(f"{found.name} has no TensorBoard: say `tensorboard: true` in the job file of the next run", 1)
    from paceline.backends.kubernetes.board import NoBoard
    from paceline.backends.kubernetes.cluster import connect

    info = runs.info(found.folder)
    # A browser hangs up when it likes; here that is no reason to end.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        return asyncio.run(_there(connect(info["context"], info["namespace"]), found.name, port))
    except NoBoard as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        return 0


def _here(folder: Path, port: int | None) -> NoReturn:
    """Becomes TensorBoard."""
    import subprocess

    from paceline.backends.local.resources import interpreter

    python = interpreter()
    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tensorboard') is None)"
    if subprocess.run([python, "-c", ask], stdin=subprocess.DEVNULL).returncode:
        fail(f"{python} has no tensorboard: pip install tensorboard, or activate an environment that has it", 1)
    if not folder.is_dir() or not any(folder.iterdir()):
        tell(f"note: nothing is in {folder} yet: tasks find it as PACELINE_TENSORBOARD_DIR")
    chosen = _free(port)
    print(f"http://127.0.0.1:{chosen}/", flush=True)
    words = ["--logdir", str(folder), "--host", "127.0.0.1", "--port", str(chosen), "--reload_interval", "5"]
    os.execv(python, [python, "-m", "tensorboard.main", *words])


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


async def _there(cluster: Cluster, run: str, port: int | None) -> int:
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
