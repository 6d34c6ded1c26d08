"""`paceline metrics`: metrics of the runs on this machine, for Prometheus."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import complete_runs
from paceline.cli.output import fail, note, one_of, tell

if TYPE_CHECKING:
    from paceline.view.files.run_folders import Run

FORMATS = ("prometheus", "openmetrics")


def main(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Run id or a unique prefix of it (default: all runs on this machine that are running, or ended less "
            "than an hour ago).",
            show_default=False,
            autocompletion=complete_runs,
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            "--listen", metavar="[HOST:]PORT",
            help="Serve the metrics at http://HOST:PORT/metrics, until Ctrl-C (default host: 127.0.0.1).",
        ),
    ] = "",
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", metavar="prometheus|openmetrics",
            help="Output format (default: prometheus); with --listen, the client chooses it.",
            autocompletion=lambda: list(FORMATS),
        ),
    ] = "",
) -> int:  # fmt: skip
    """Print metrics of runs for Prometheus, or serve them over HTTP.

    \b
    Examples:
      paceline metrics > paceline.tmp && mv paceline.tmp paceline.prom      For a node exporter
      paceline metrics --listen 9464                                        For Prometheus
    """
    one_of(output, FORMATS)
    if listen and output:
        fail("-o cannot be used with --listen: the client chooses the format")
    address = _address(listen) if listen else None
    from paceline.client.reading.find_run import find_run
    from paceline.view.report import run_metrics

    selected = None if run is None else find_run(run)

    def text(openmetrics: bool) -> bytes:
        now = time.time()
        return run_metrics.text(_runs(selected, now), now, openmetrics)

    if address is not None:
        return _serve(address, text)
    sys.stdout.buffer.write(text(output == "openmetrics"))
    sys.stdout.flush()
    return 0


def _runs(selected: Run | None, now: float) -> list[Run]:
    from paceline.view.report import run_metrics

    return run_metrics.recent(now) if selected is None else [selected]


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not port.isascii() or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        fail("invalid address", where=f"--listen {listen!r}", remedy="use 9464 or 127.0.0.1:9464")
    return host.strip("[]") or "127.0.0.1", int(port)


def _serve(address: tuple[str, int], text: Callable[[bool], bytes]) -> int:
    from paceline.agent.metrics.server import MetricsServer
    from paceline.agent.net.loop import Loop
    from paceline.agent.options import METRICS_PATH

    problems: list[str] = []
    loop = Loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.on_signal(number, loop.stop)
    server = MetricsServer(loop, address, text, problems.append)
    if not server.port:
        fail(problems[0], 1, remedy="choose another address with --listen")
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    print(f"http://{host}:{server.port}{METRICS_PATH}", flush=True)
    if address[0] not in ("127.0.0.1", "::1", "localhost"):
        note("anyone who can reach this address can read the metrics: there is no authentication")
    tell("press Ctrl-C to quit")
    try:
        loop.run()
    finally:
        server.close()
    return 0
