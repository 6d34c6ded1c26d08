"""`paceline doctor`: checks whether this machine or a cluster can train, and says how to fix problems."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.backends.check_result import FAIL, OK, WARN, Check
from paceline.cli.options import ContextOption, JsonOption, NamespaceOption
from paceline.cli.output import fail, one_of, print_json

_GIB = 1 << 30


def main(
    on: Annotated[
        str, typer.Option("--on", metavar="local|kubernetes", help="What to check: this machine or a cluster.")
    ] = "local",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    output: JsonOption = "",
) -> int:
    """Check this machine or, with --on kubernetes, whether you can run jobs on a cluster.

    Exit code: 0 if no check fails, otherwise 1.
    """
    one_of(output, ("json",))
    one_of(on, ("local", "kubernetes"), "--on")
    if on == "local" and (context or namespace):
        fail(f"{'--context' if context else '-n'} requires --on kubernetes")
    checks = []
    for check in _check_cluster(context, namespace) if on == "kubernetes" else _check_machine():
        checks.append(check)
        if not output:
            print(_line(check, 16 if on == "kubernetes" else 12), flush=True)
    failed = [check for check in checks if check.result == FAIL]
    if output:
        from paceline.client.json_form import versioned

        print_json(versioned({"ok": not failed, "checks": [asdict(check) for check in checks]}))
    return 1 if failed else 0


def _check_cluster(context: str | None, namespace: str | None) -> Iterator[Check]:
    from paceline.backends.kubernetes.doctor import run_checks

    return run_checks(context, namespace)


def _check_machine() -> Iterator[Check]:
    for check in CHECKS:
        yield from _run_check(check)


def _run_check(check: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    try:
        yield from check()
    except OSError as error:
        yield Check(check.__name__.strip("_"), WARN, f"cannot be checked: {error}")


def _line(check: Check, width: int) -> str:
    from paceline.view.text.terminal import colored

    result = f"{check.result:<4}"
    if colored(sys.stdout):
        result = f"\x1b[{ {OK: 32, WARN: 33, FAIL: 31}[check.result] }m{result}\x1b[0m"
    remedy = f"\n      -> {check.remedy}" if check.remedy else ""
    return f"{result}  {check.name:<{width}} {check.found}{remedy}"


def _python() -> Iterator[Check]:
    import platform

    version = f"{platform.python_version()} at {sys.executable}"
    supported = sys.version_info >= (3, 11)
    yield Check(
        "python", OK if supported else FAIL, version, "" if supported else "Paceline needs Python 3.11 or newer"
    )


def _system() -> Iterator[Check]:
    import platform

    linux = sys.platform.startswith("linux")
    remedy = "" if linux else "some protections (memory limits, process clean-up) work only on Linux"
    yield Check(
        "system", OK if linux else WARN, f"{platform.system()} {platform.release()} {platform.machine()}", remedy
    )


def _frameworks() -> Iterator[Check]:
    from importlib.metadata import PackageNotFoundError, version

    any_installed = False
    for name, packages in {
        "tensorflow": ("tensorflow", "tensorflow-cpu"),
        "torch": ("torch",),
        "jax": ("jax",),
    }.items():
        for package in packages:
            try:
                extra = f", keras {version('keras')}" if name == "tensorflow" else ""
                yield Check(name, OK, f"{version(package)}{extra}")
                any_installed = True
                break
            except PackageNotFoundError:
                continue
    if not any_installed:
        yield Check(
            "frameworks",
            WARN,
            "tensorflow, torch and jax are not installed",
            "install the framework of your jobs in this environment, or activate one that has it",
        )


def _environment() -> Iterator[Check]:
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    if active and Path(active).resolve() != Path(sys.prefix).resolve():
        yield Check("environment", OK, f"{active} is active: jobs use its `python`")


def _machine() -> Iterator[Check]:
    from paceline.agent import os_processes
    from paceline.view import machine_info
    from paceline.view.text.wording import size

    gpus = machine_info.gpus()
    if gpus is None:
        yield Check("gpus", OK, "none (nvidia-smi was not found)")
    else:
        kinds = ", ".join(f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus))
        yield Check(
            "gpus",
            OK if gpus else WARN,
            kinds or "nvidia-smi lists none",
            "" if gpus else "check the driver: nvidia-smi",
        )
    yield Check("cores", OK, str(os_processes.cores()))
    yield from _amx()
    total, free = machine_info.memory(), machine_info.free_memory()
    if total is not None:
        short = free is not None and free < 2 * _GIB
        amount = size(total) + (f", {size(free)} free" if free is not None else "")
        yield Check(
            "memory",
            WARN if short else OK,
            amount,
            "a TensorFlow task needs about 0.5 GiB just to start" if short else "",
        )


def _amx() -> Iterator[Check]:
    """Reports nothing for CPUs without AMX, which are most."""
    from paceline.frameworks import amx_probe

    state = amx_probe.state()
    if state == amx_probe.WORKS:
        yield Check("amx", OK, "works: frameworks use it for bfloat16")
    elif state == amx_probe.TRAPS:
        remedy = f"tasks get {amx_probe.VARIABLE}={amx_probe.LIMIT}; set it yourself for programs outside Paceline"
        yield Check("amx", WARN, amx_probe.FINDING, remedy)


def _disk() -> Iterator[Check]:
    import shutil

    from paceline.view.files.run_folders import home
    from paceline.view.text.wording import size

    folder = home()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        yield Check("disk", FAIL, f"{existing} is not writable", "set PACELINE_HOME to a folder that you can write to")
        return
    free = shutil.disk_usage(existing).free
    result = OK if free > 2 * _GIB else WARN if free > _GIB // 10 else FAIL
    remedy = "" if result == OK else "paceline delete --finished, or set PACELINE_HOME to a folder on a larger disk"
    yield Check("disk", result, f"{size(free)} free at {folder}", remedy)


def _ports() -> Iterator[Check]:
    import socket

    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen()
            client.settimeout(5)
            client.connect(server.getsockname())
    except OSError as error:
        yield Check(
            "ports", FAIL, f"127.0.0.1 cannot be used: {error}", "bring up the loopback interface: ip link set lo up"
        )
        return
    yield Check("ports", OK, "127.0.0.1 can be bound and reached")
    proxy = next((name for name in ("grpc_proxy", "https_proxy", "http_proxy") if os.environ.get(name)), None)
    direct = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""  # noqa: SIM112
    if proxy and not any(entry.strip() in ("127.0.0.1", "127.0.0.0/8", "*") for entry in direct.split(",")):
        yield Check(
            "proxy", WARN, f"{proxy} is set and no_proxy lacks 127.0.0.1: TensorFlow's gRPC may use the proxy",
            "export no_proxy=localhost,127.0.0.1",
        )  # fmt: skip


def _clock() -> Iterator[Check]:
    import tempfile

    from paceline.view.files.run_folders import home

    now = time.time()
    if time.gmtime(now).tm_year < 2024:
        yield Check(
            "clock",
            FAIL,
            time.strftime("the date is set to %Y-%m-%d", time.gmtime(now)),
            "set the clock: certificates need the right time",
        )
        return
    folder = home() if home().is_dir() else None
    with tempfile.NamedTemporaryFile(prefix=".paceline-clock-", dir=folder) as file:
        offset = os.fstat(file.fileno()).st_mtime - time.time()
    agrees = abs(offset) < 2
    finding = "agrees with the file system" if agrees else f"the file system's clock is {offset:+.0f} s off"
    yield Check(
        "clock",
        OK if agrees else WARN,
        finding,
        "" if agrees else "synchronize the clocks of this machine and its file server (NTP)",
    )


def _files() -> Iterator[Check]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= 1024
    maximum = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    finding = f"soft limit {soft}, hard limit {maximum}"
    yield Check("open files", OK if enough else WARN, finding, "" if enough else "ulimit -n 4096")


def _leftovers() -> Iterator[Check]:
    from paceline.view.files import run_folders
    from paceline.view.state import status_reader

    runs = run_folders.all_runs()
    running = [run.name for run in runs if run_folders.alive(run.folder)]
    unreported = [run for run in runs if run.name not in running and not (run.folder / "report.json").exists()]
    crashed = [run.name for run in unreported if status_reader.summary(run)["status"] == "failed"]
    if crashed:
        names, more = " ".join(crashed[:5]), " ..." if len(crashed) > 5 else ""
        finding = f"{len(crashed)} ended without a report: {names}{more}"
        yield Check("runs", WARN, finding, f"paceline delete {names}")
    else:
        yield Check("runs", OK, f"{len(runs)} known, {len(running)} running")


CHECKS = (_python, _system, _environment, _frameworks, _machine, _disk, _ports, _clock, _files, _leftovers)
