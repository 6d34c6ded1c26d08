"""`paceline doctor`: whether this machine, or a cluster, is fit to train on, and what to do where it is not."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.backends.check import FAIL, OK, WARN, Check
from paceline.cli.options import ContextOption, JsonOption, NamespaceOption
from paceline.cli.say import fail, one_of, print_json

_GIB = 1 << 30


def main(
    on: Annotated[str, typer.Option("--on", metavar="WHERE", help="local (this machine) or kubernetes.")] = "local",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    output: JsonOption = "",
) -> int:
    """Check this machine; or, with --on kubernetes, whether you can run jobs on a cluster. Exit code 0 where nothing
    fails.
    """
    one_of(output, ("json",))
    one_of(on, ("local", "kubernetes"), "--on")
    if on == "local" and (context or namespace):
        fail(f"{'--context' if context else '-n'} is for --on kubernetes")
    checks = []
    for check in _cluster(context, namespace) if on == "kubernetes" else _here():
        checks.append(check)
        if not output:
            print(_line(check, 16 if on == "kubernetes" else 12), flush=True)
    failed = [check for check in checks if check.result == FAIL]
    if output:
        print_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
    return 1 if failed else 0


def _cluster(context: str | None, namespace: str | None) -> Iterator[Check]:
    from paceline.backends.kubernetes.checks import look

    return look(context, namespace)


def _here() -> Iterator[Check]:
    for look in CHECKS:
        yield from _safely(look)


def _safely(look: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    try:
        yield from look()
    except OSError as error:
        yield Check(look.__name__.strip("_"), WARN, f"cannot be told: {error}")


def _line(check: Check, width: int) -> str:
    from paceline.view.terminal import coloured

    shown = f"{check.result:<4}"
    if coloured(sys.stdout):
        shown = f"\x1b[{ {OK: 32, WARN: 33, FAIL: 31}[check.result] }m{shown}\x1b[0m"
    remedy = f"\n      -> {check.remedy}" if check.remedy else ""
    return f"{shown}  {check.name:<{width}} {check.found}{remedy}"


def _python() -> Iterator[Check]:
    import platform

    found = f"{platform.python_version()} at {sys.executable}"
    fine = sys.version_info >= (3, 11)
    yield Check("python", OK if fine else FAIL, found, "" if fine else "Paceline needs Python 3.11 or newer")


def _system() -> Iterator[Check]:
    import platform

    linux = sys.platform.startswith("linux")
    remedy = "" if linux else "runs on this machine lack some guards that only Linux has (memory limits, clean-up)"
    yield Check(
        "system", OK if linux else WARN, f"{platform.system()} {platform.release()} {platform.machine()}", remedy
    )


def _frameworks() -> Iterator[Check]:
    from importlib.metadata import PackageNotFoundError, version

    found = False
    for name, packages in {
        "tensorflow": ("tensorflow", "tensorflow-cpu"),
        "torch": ("torch",),
        "jax": ("jax",),
    }.items():
        for package in packages:
            try:
                extra = f", keras {version('keras')}" if name == "tensorflow" else ""
                yield Check(name, OK, f"{version(package)}{extra}")
                found = True
                break
            except PackageNotFoundError:
                continue
    if not found:
        yield Check(
            "frameworks",
            WARN,
            "no tensorflow, torch or jax here",
            "pip install 'paceline[torch]', or activate your environment",
        )


def _environment() -> Iterator[Check]:
    own = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    if own and Path(own).resolve() != Path(sys.prefix).resolve():
        yield Check("environment", OK, f"{own} is active: `python` in a job is the one in there")


def _machine() -> Iterator[Check]:
    from paceline.view import machine
    from paceline.view.words import size

    gpus = machine.gpus()
    if gpus is None:
        yield Check("gpus", OK, "none that nvidia-smi knows")
    else:
        kinds = ", ".join(f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus))
        yield Check(
            "gpus",
            OK if gpus else WARN,
            kinds or "nvidia-smi finds none",
            "" if gpus else "check the driver: nvidia-smi",
        )
    yield Check("cores", OK, str(machine.cores()))
    yield from _amx()
    total, free = machine.memory(), machine.free_memory()
    if total is not None:
        short = free is not None and free < 2 * _GIB
        found = size(total) + (f", {size(free)} free" if free is not None else "")
        yield Check(
            "memory",
            WARN if short else OK,
            found,
            "a TensorFlow task takes about 0.5 GiB before it does anything" if short else "",
        )


def _amx() -> Iterator[Check]:
    """Only where it is worth a line: most CPUs have none."""
    from paceline.frameworks import amx

    found = amx.state()
    if found == amx.WORKS:
        yield Check("amx", OK, "works: frameworks use it for bfloat16")
    elif found == amx.TRAPS:
        remedy = f"tasks get {amx.VARIABLE}={amx.LIMIT}; set it yourself for programs outside Paceline"
        yield Check("amx", WARN, amx.FINDING, remedy)


def _disk() -> Iterator[Check]:
    import shutil

    from paceline.view.runs import home
    from paceline.view.words import size

    folder = home()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        yield Check("disk", FAIL, f"{there} cannot be written", "set PACELINE_HOME to a folder of yours")
        return
    free = shutil.disk_usage(there).free
    result = OK if free > 2 * _GIB else WARN if free > _GIB // 10 else FAIL
    remedy = "" if result == OK else "paceline delete --finished, or set PACELINE_HOME to a larger disk"
    yield Check("disk", result, f"{size(free)} free at {folder}", remedy)


def _ports() -> Iterator[Check]:
    import socket

    try:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            one.listen()
            two.settimeout(5)
            two.connect(one.getsockname())
    except OSError as error:
        yield Check(
            "ports", FAIL, f"127.0.0.1 cannot be used: {error}", "bring up the loopback interface: ip link set lo up"
        )
        return
    yield Check("ports", OK, "127.0.0.1 can be bound and reached")
    proxy = next((name for name in ("grpc_proxy", "https_proxy", "http_proxy") if os.environ.get(name)), None)
    direct = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""  # noqa: SIM112
    if proxy and not any(word.strip() in ("127.0.0.1", "127.0.0.0/8", "*") for word in direct.split(",")):
        yield Check(
            "proxy", WARN, f"{proxy} is set, and no_proxy leaves out 127.0.0.1: TensorFlow's gRPC may go through it",
            "export no_proxy=localhost,127.0.0.1",
        )  # fmt: skip


def _clock() -> Iterator[Check]:
    import tempfile

    from paceline.view.runs import home

    now = time.time()
    if time.gmtime(now).tm_year < 2024:
        yield Check(
            "clock",
            FAIL,
            time.strftime("it says %Y-%m-%d", time.gmtime(now)),
            "set the clock: certificates depend on it",
        )
        return
    folder = home() if home().is_dir() else None
    with tempfile.NamedTemporaryFile(prefix=".paceline-clock-", dir=folder) as file:
        off = os.fstat(file.fileno()).st_mtime - time.time()
    fine = abs(off) < 2
    found = "right, as far as the file system tells" if fine else f"the file system's is {off:+.0f} s off"
    yield Check(
        "clock",
        OK if fine else WARN,
        found,
        "" if fine else "synchronise the clocks (NTP) of this machine and its file server",
    )


def _files() -> Iterator[Check]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fine = soft == resource.RLIM_INFINITY or soft >= 1024
    limit = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    yield Check("open files", OK if fine else WARN, f"{soft} of at most {limit}", "" if fine else "ulimit -n 4096")


def _leftovers() -> Iterator[Check]:
    from paceline.view import runs, state

    found = runs.every()
    running = [run.name for run in found if runs.alive(run.folder)]
    silent = [run.name for run in found if run.name not in running and not (run.folder / "report.json").exists()]
    silent = [name for name in silent if state.summary(runs.Run(name, runs.runs_folder() / name))["status"] == "failed"]
    if silent:
        names = " ".join(silent[:5]) + (" ..." if len(silent) > 5 else "")
        yield Check(
            "runs",
            WARN,
            f"{len(silent)} ended without a report: {names}",
            f"paceline delete {names.removesuffix(' ...')}",
        )
    else:
        yield Check("runs", OK, f"{len(found)} kept, {len(running)} running")


CHECKS = (_python, _system, _environment, _frameworks, _machine, _disk, _ports, _clock, _files, _leftovers)
