"""Starts the supervisor of a run by `python -m`, in a session of its own: a process with threads must not be forked.

The request, which contains the plan, the lock of the run, its reserved ports and two pipes arrive as inherited
descriptors. This process forks once, as it has only one thread, so that the supervisor is nobody's zombie when it ends;
the caller waits only for the parent. The pid of the supervisor has a pipe of its own: anything that Python runs when it
starts may print.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

from paceline.backends.local.host_shares import CannotRun, Share
from paceline.plan import Plan, to_data

MODULE = "paceline.backends.local.detached_start"
PATIENCE_S = 60.0  # seconds for Python to start on a busy machine
_JUPYTER = "JPY_"


def start_supervisor(
    plan: Plan, run: str, folder: Path, captain: str, shares: Mapping[str, Share], interpreter: str, lock: int,
    recorded: int, page: str, metrics: str, ports: Sequence[int] = (),
) -> int:  # fmt: skip
    """Returns the pid of the supervisor, which waits until `recorded` is readable or closed and ends if the run has no
    run.json then. `lock`, `ports`: the descriptors that hold the lock of the run and reserve its ports. Raises
    CannotRun."""
    from paceline.frameworks.python_start import module_command

    if not sys.executable:
        raise CannotRun("the interpreter of this process is unknown", remedy="start the run with `paceline run`")
    with ExitStack() as descriptors:
        reported, report = os.pipe()
        for end in (reported, report):
            descriptors.callback(os.close, end)
        os.set_blocking(reported, False)
        request = {
            "plan": to_data(plan), "run": run, "folder": str(folder), "captain": captain, "interpreter": interpreter,
            "page": page, "metrics": metrics, "lock": lock, "recorded": recorded, "report": report,
            "ports": list(ports),
            "shares": {host: [share.cores, list(share.devices)] for host, share in shares.items()},
        }  # fmt: skip
        source = _as_file(json.dumps(request).encode())
        descriptors.callback(os.close, source)
        log = os.open(folder / "agents.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        descriptors.callback(os.close, log)
        try:
            started = subprocess.run(
                module_command(sys.executable, MODULE, str(source)), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=(source, lock, recorded, report, *ports), env=without_jupyter(os.environ),
                start_new_session=True, timeout=PATIENCE_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise CannotRun(f"cannot start the run: its supervisor has not started within {PATIENCE_S:g} s") from None
        pid = b""
        with suppress(BlockingIOError):
            pid = os.read(reported, 64)
    if started.returncode != 0 or not pid:
        lines = (folder / "agents.log").read_text(errors="replace").split("\n")
        reason = next((line for line in reversed(lines) if line.strip()), f"exit code {started.returncode}")
        raise CannotRun(f"cannot start the run: its supervisor ended: {reason}")
    return int(pid)


def without_jupyter(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that Jupyter sets for its kernels: tasks are no kernels.

    >>> without_jupyter({"JPY_PARENT_PID": "7", "MPLBACKEND": "module://matplotlib_inline.backend_inline", "A": "b"})
    {'A': 'b'}
    """
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_JUPYTER) and not (name == "MPLBACKEND" and value.startswith("module://"))
    }


def _as_file(data: bytes) -> int:
    """A descriptor from which the data can be read, and which has no name: the plan contains variables of the user."""
    import tempfile

    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        file.seek(0)
        return os.dup(file.fileno())


def main(arguments: list[str]) -> NoReturn:
    """`arguments`: the descriptor of the request."""
    from paceline.backends.local.supervisor import supervise
    from paceline.view.files.plan_files import plan_of

    with os.fdopen(int(arguments[0]), "rb") as file:
        request: dict[str, Any] = json.load(file)
    # A notebook may have imported an earlier version, which reserves no ports.
    for descriptor in (request["lock"], request["recorded"], request["report"], *request.get("ports", ())):
        os.set_inheritable(descriptor, False)
    plan = plan_of(request["plan"])
    shares = {host: Share(cores, tuple(devices)) for host, (cores, devices) in request["shares"].items()}
    pid = os.fork()  # after everything that can fail
    if pid:
        os.write(request["report"], str(pid).encode())
        os._exit(0)
    os.close(request["report"])
    supervise(
        plan, request["run"], Path(request["folder"]), request["captain"], shares, request["interpreter"], -1,
        request["recorded"], request["page"], request["metrics"],
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
