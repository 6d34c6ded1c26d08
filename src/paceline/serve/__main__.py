"""`python -m paceline.serve`: serves the newest model in a folder; started by `paceline serve` and in pods."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import NoReturn

from paceline.frameworks import amx_probe

_OTHER_FILES = 128  # files that are not connections


def main() -> NoReturn:
    options = _parse_options()
    os.environ.update(amx_probe.environment(os.environ))  # before any framework is imported
    try:
        from paceline.serve import listening
        from paceline.serve.app import Limits, Server
        from paceline.serve.connections import ConnectionLimits, uvicorn_config
        from paceline.serve.graceful_exit import GracefulServer, Shutdown
    except ImportError as error:
        _exit_with(f"{error.name} is not installed for {sys.executable}; install the extra paceline[serve] there")
    from paceline.serve.metrics import Metrics
    from paceline.serve.versions import Versions

    metrics = Metrics()
    versions = Versions(options.base, metrics, _print_message)
    shutdown = Shutdown()

    async def serve() -> None:
        await versions.update()
        if versions.model is None:
            no_version = f"{options.base} contains no model version: a folder whose name is a number"
            _exit_with("; ".join(versions.failed.values()) or no_version)
        try:
            listener = listening.listen(options.host, options.port)
        except OSError as error:
            reason = error.strerror or os.strerror(error.errno or 0)
            _exit_with(f"cannot use port {options.port} of {options.host}: {reason}")
        memory = max(options.most_memory, options.most_bytes)
        limits = Limits(options.most_bytes, options.most_seconds, options.batch, options.waiting, memory)
        hosts = listening.allowed_hosts(listener, options.host)
        app = Server(options.name, versions, metrics, limits, shutdown, hosts).app()
        connections = ConnectionLimits(
            options.most_header_bytes, options.most_header_seconds, options.most_seconds,
            max(1, min(options.most_connections, listening.raise_file_limit() - _OTHER_FILES)),
        )  # fmt: skip
        port = listener.getsockname()[1]
        print(f"http://{listening.url_host(listener)}:{port}/v1/models/{options.name}:predict", flush=True)
        await GracefulServer(uvicorn_config(app, connections), shutdown, options.leave_after).serve(sockets=[listener])

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
        sys.stdout.flush()
        os._exit(0)  # do not wait for model calls that have timed out


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m paceline.serve", description="Serve the newest model in a folder.")
    parser.add_argument("--base", type=Path, required=True, help="folder with one subfolder per model version")
    parser.add_argument("--name", required=True, help="model name in URLs")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s); :: or '' means all addresses"
    )
    parser.add_argument("--port", type=int, default=8501, help="port to listen on (default: %(default)s)")
    parser.add_argument("--most-bytes", type=int, default=32 * 1024 * 1024, help="maximum size of a request body")
    parser.add_argument("--most-seconds", type=float, default=30.0, help="time limit of a request")
    parser.add_argument(
        "--most-memory", type=int, default=128 * 1024 * 1024, help="maximum size of all requests and responses together"
    )
    parser.add_argument("--most-header-bytes", type=int, default=64 * 1024, help="maximum size of request headers")
    parser.add_argument("--most-header-seconds", type=float, default=10.0, help="time limit to receive headers")
    parser.add_argument("--most-connections", type=int, default=1000, help="maximum number of open connections")
    parser.add_argument("--batch", type=int, default=64, help="maximum number of examples per model call")
    parser.add_argument("--waiting", type=int, default=4096, help="maximum number of waiting examples")
    parser.add_argument(
        "--leave-after", type=float, default=5.0, help="seconds to keep answering after SIGTERM; Ctrl-C does not wait"
    )
    return parser.parse_args()


def _print_message(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _exit_with(error: str) -> NoReturn:
    _print_message(f"paceline serve: {error}")
    os._exit(1)


if __name__ == "__main__":
    main()
