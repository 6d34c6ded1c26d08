"""`paceline serve`: a run's model over REST, at an address of this machine, until Ctrl-C."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import ContextOption, NamespaceOption
from paceline.cli.reading import (
    CodeOption,
    JobOption,
    SnapshotOption,
    Where,
    ended_like_ctrl_c,
    meant,
    opened,
    restored,
)
from paceline.cli.say import fail, one_of, tell

if TYPE_CHECKING:
    from paceline.storage.manifest import Id

PORT, HOST = 8501, "127.0.0.1"
LOOK_S = 5.0  # between two looks for a newer snapshot
END_S = 60.0  # for the server to answer what it was asked, once it is told to end
_ASK = "import sys, importlib.util as u; m = [n for n in sys.argv[1:] if u.find_spec(n) is None]; print(*m)"
_NEEDS = ("httptools", "numpy", "orjson", "starlette", "uvicorn", "uvloop")


def main(
    run: Where = None,
    snapshot: SnapshotOption = None,
    port: Annotated[int, typer.Option("--port", metavar="N", help="The local port; 0: a free one.")] = PORT,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to listen at.")] = HOST,
    name: Annotated[str, typer.Option("--name", help="The model's name in paths; the job's if left out.")] = "",
    job: JobOption = "",
    code: CodeOption = "",
    on: Annotated[str, typer.Option("--on", metavar="WHERE", help="kubernetes: pods of a cluster serve it.")] = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    stop: Annotated[bool, typer.Option("--stop", help="With --on kubernetes: serve it no more.")] = False,
) -> int:
    """Serve the model of a run over REST, with TensorFlow Serving's paths, until Ctrl-C.

    \b
    paceline serve translate-3f9a
    curl http://127.0.0.1:8501/v1/models/translate:predict -d '{"instances": [...]}'
    paceline serve translate-3f9a --on kubernetes

    The model is what the job's `export.command` makes of the newest snapshot. A newer snapshot is taken over while
    requests go on, unless --snapshot names one. With --on kubernetes, pods serve it as the job's `serve` says, until
    --stop; called again, it takes a newer snapshot over.
    """
    if one_of(on, ("local", "kubernetes"), "--on") == "kubernetes":
        from paceline.cli.serving import serve_on_kubernetes, stop_on_kubernetes

        if port != PORT or host != HOST:
            fail("--port and --host are for this machine: on a cluster, serve.service says who reaches it")
        if stop:
            return stop_on_kubernetes(run, context, namespace)
        return serve_on_kubernetes(run, snapshot, name, job, code, context, namespace)
    if stop:
        fail("--stop is for --on kubernetes: on this machine, Ctrl-C ends it")
    if not 0 <= port < 65536:
        fail(f"--port {port}: a port is at most 65535")
    python = _python()
    base = Path(tempfile.mkdtemp(prefix="paceline-serve-"))
    offered = Offered(base, run, job, code, on, context, namespace)
    try:
        with ended_like_ctrl_c():
            offered.export(snapshot)
            words = ["--base", str(base), "--name", name or offered.job, "--host", host, "--port", str(port)]
            words += ["--leave-after", "0"]  # nothing here leads its clients to another server
            return _serve([python, "-m", "paceline.serve", *words], None if snapshot else offered)
    except KeyboardInterrupt:
        return 0
    finally:
        shutil.rmtree(base, ignore_errors=True)


class Offered:
    """The models of a run, in a folder with a folder for each version, which the server looks at."""

    def __init__(
        self, base: Path, run: str | None, job: str, code: str, on: str, context: str | None, namespace: str | None
    ) -> None:
        self._base, self._run, self._job, self._code = base, run, job, code
        self._where = on, context, namespace
        self._newest: Id | None = None
        self._trouble = ""
        self.job = ""  # the name of the run's job

    def look(self) -> None:
        """Trouble with a newer one is told, once: the one before goes on."""
        try:
            with opened(self._run, *self._where) as source:
                found = meant(source, source.reader.known(), None)
            if self._newest is None or found.step > self._newest.step:
                for older in self._base.iterdir():
                    if older.name != str(self._newest and self._newest.step):
                        shutil.rmtree(older)
                self.export(None)
            self._trouble = ""
        except Exception as error:
            if str(error) != self._trouble:
                tell(f"note: no newer model: {error}")
            self._trouble = str(error)

    def export(self, snapshot: str | None) -> None:
        from paceline.view import exporting, programs

        with restored(
            self._run, snapshot, *self._where, lambda source: programs.find(source, "export", self._job, self._code)
        ) as (program, held, made):
            self.job = program.job
            exporting.export(program, held.folder, made.run, made.id, self._base / str(made.id.step))
            self._newest = made.id


def _serve(command: list[str], offered: Offered | None) -> int:
    from paceline.agent.machine import die_with_parent

    # In a session of its own: Ctrl-C is for this process, which lets it answer what it was asked.
    server = subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.DEVNULL, preexec_fn=lambda: die_with_parent(signal.SIGTERM)
    )
    try:
        while True:
            try:
                code = server.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                if offered is not None:
                    offered.look()
                continue
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            fail(f"the server {how}", 1)
    finally:
        if server.poll() is None:
            server.terminate()
            try:
                server.wait(END_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                server.kill()
                server.wait()


def _python() -> str:
    """An interpreter that has the server's libraries: that of the framework."""
    from paceline.backends.local.resources import interpreter

    python = interpreter()
    asked = subprocess.run([python, "-c", _ASK, "paceline", *_NEEDS], capture_output=True, text=True)
    if missing := asked.stdout.split():
        fail(f"{python} has no {', '.join(missing)}: pip install 'paceline[serve]' there", 1)
    if asked.returncode:
        fail(f"{python} cannot be run: {asked.stderr.strip() or os.strerror(asked.returncode)}", 1)
    return python
