"""`paceline serve`: serves a run's model over REST on this machine until Ctrl-C, or in pods."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import ContextOption, EndpointOption, NamespaceOption
from paceline.cli.output import fail, note, one_of
from paceline.cli.snapshot_options import (
    CodeOption,
    JobOption,
    RunOrLocation,
    SnapshotOption,
    interrupt_on_signals,
    opened,
    restored,
)
from paceline.frameworks.python_start import code_command, module_command

if TYPE_CHECKING:
    from paceline.storage.snapshots.manifest import SnapshotId

PORT, HOST = 8501, "127.0.0.1"
POLL_S = 5.0  # seconds between two checks for a newer snapshot
STOP_TIMEOUT_S = 60.0  # seconds for the server to answer pending requests after SIGTERM
_FIND_MISSING = "import sys, importlib.util as u; m = [n for n in sys.argv[1:] if u.find_spec(n) is None]; print(*m)"
_REQUIRED_MODULES = ("httptools", "numpy", "orjson", "starlette", "uvicorn", "uvloop")


def main(
    run: RunOrLocation = None,
    snapshot: SnapshotOption = None,
    port: Annotated[int, typer.Option("--port", metavar="N", help="Local port; 0 chooses a free one.")] = PORT,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = HOST,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Model name in URLs (default: the job's name).")
    ] = "",
    job: JobOption = "",
    code: CodeOption = "",
    on: Annotated[
        str,
        typer.Option(
            "--on",
            metavar="local|kubernetes",
            help="Where to serve: on this machine (default) or from pods on a cluster.",
        ),
    ] = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
    stop: Annotated[bool, typer.Option("--stop", help="With --on kubernetes: stop serving.")] = False,
) -> int:
    """Serve a run's model over REST, with the URLs of TensorFlow Serving, until Ctrl-C.

    \b
    Examples:
      paceline serve translate-3f9a
      curl http://127.0.0.1:8501/v1/models/translate:predict -d '{"instances": [...]}'
      paceline serve translate-3f9a --on kubernetes

    The job's `export.command` exports the model from the newest snapshot. When a newer snapshot is committed, the
    server switches to it without interruption, unless --snapshot is given.

    With --on kubernetes, pods serve the model as the job's `serve` section describes, until --stop. Run the command
    again to switch to a newer snapshot.
    """
    if one_of(on, ("local", "kubernetes"), "--on") == "kubernetes":
        from paceline.cli.serve_on_kubernetes import serve_on_kubernetes, stop_on_kubernetes

        if port != PORT or host != HOST:
            fail(
                "--port and --host cannot be used with --on kubernetes",
                remedy="set serve.service in the job file to expose the server",
            )
        if stop:
            return stop_on_kubernetes(run, context, namespace)
        return serve_on_kubernetes(run, snapshot, name, job, code, context, namespace, endpoint)
    if stop:
        fail("--stop requires --on kubernetes", remedy="on this machine, press Ctrl-C")
    if not 0 <= port < 65536:
        fail("invalid port", where=f"--port {port}", remedy="use 0 to 65535")
    python = _python()
    base = Path(tempfile.mkdtemp(prefix="paceline-serve-"))
    exporter = ModelExporter(base, run, job, code, (on, context, namespace, endpoint))
    try:
        with interrupt_on_signals():
            exporter.export(snapshot)
            arguments = ["--base", str(base), "--name", name or exporter.job, "--host", host, "--port", str(port)]
            arguments += ["--leave-after", "0"]  # there is no other server that clients could use
            command = module_command(python, "paceline.serve", *arguments)
            return _serve(command, None if snapshot else exporter)
    except KeyboardInterrupt:
        return 0
    finally:
        shutil.rmtree(base, ignore_errors=True)


class ModelExporter:
    """Exports models of a run to `base`, one folder per version, where the server finds them."""

    def __init__(
        self, base: Path, run: str | None, job: str, code: str, target: tuple[str, str | None, str | None, str]
    ) -> None:
        """`target`: values of --on, --context, --namespace and --endpoint."""
        self._base, self._run, self._job, self._code, self._target = base, run, job, code, target
        self._newest: SnapshotId | None = None
        self._last_error = ""
        self.job = ""  # name of the run's job

    def update(self) -> None:
        """Exports a newer snapshot, if any. An error is reported once; the previous model stays in use."""
        try:
            from paceline.client.snapshots.snapshot_lookup import find_snapshot

            with opened(self._run, *self._target) as source:
                newest = find_snapshot(source, source.reader.inventory(), None)
            if self._newest is None or newest.step > self._newest.step:
                for older in self._base.iterdir():
                    if older.name != str(self._newest and self._newest.step):
                        shutil.rmtree(older)
                self.export(None)
            self._last_error = ""
        except Exception as error:
            if str(error) != self._last_error:
                note(f"cannot update the model, still serving the previous one: {error}")
            self._last_error = str(error)

    def export(self, snapshot: str | None) -> None:
        from paceline.client.models import job_programs, model_export

        with restored(
            self._run,
            snapshot,
            *self._target,
            lambda source: job_programs.find(source, "export", self._job, self._code),
        ) as (program, restored_snapshot, manifest):
            self.job = program.job
            to = self._base / str(manifest.id.step)
            model_export.export(program, restored_snapshot.folder, manifest.run, manifest.id, to)
            self._newest = manifest.id


def _serve(command: list[str], exporter: ModelExporter | None) -> int:
    from paceline.agent.os_processes import die_with_parent

    # In a separate session: Ctrl-C reaches only this process, which lets the server answer pending requests.
    server = subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.DEVNULL, preexec_fn=lambda: die_with_parent(signal.SIGTERM)
    )
    try:
        while True:
            try:
                code = server.wait(POLL_S)
            except subprocess.TimeoutExpired:
                if exporter is not None:
                    exporter.update()
                continue
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            fail(f"the server {how}", 1)
    finally:
        if server.poll() is None:
            server.terminate()
            try:
                server.wait(STOP_TIMEOUT_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                server.kill()
                server.wait()


def _python() -> str:
    """The framework's interpreter; fails if it lacks the server's libraries."""
    from paceline.backends.local.host_shares import interpreter

    python = interpreter()
    command = code_command(python, _FIND_MISSING, "paceline", *_REQUIRED_MODULES)
    result = subprocess.run(command, capture_output=True, text=True)
    if missing := result.stdout.split():
        verb = "is" if len(missing) == 1 else "are"
        remedy = "install the extra paceline[serve] in this environment, or activate one that has it"
        fail(f"{', '.join(missing)} {verb} not installed for {python}", 1, remedy=remedy)
    if result.returncode:
        fail(f"cannot run {python}: {result.stderr.strip() or os.strerror(result.returncode)}", 1)
    return python
