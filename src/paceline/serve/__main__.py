"""`python -m paceline.serve`: serves the newest model in a folder; started by `paceline serve` and in pods."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from paceline.frameworks import amx


def main() -> NoReturn:
    options = _parse_options()
    os.environ.update(amx.environment(os.environ))  # before any framework is imported
    try:
        import uvicorn

        from paceline.serve.app import Limits, Server
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
            listener = socket.create_server((options.host, options.port), backlog=2048)
        except OSError as error:
            _exit_with(f"cannot use port {options.port} of {options.host}: {os.strerror(error.errno or 0)}")
        limits = Limits(options.most_bytes, options.most_seconds, options.batch, options.waiting)
        app = Server(options.name, versions, metrics, limits, shutdown).app()
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=int(options.most_seconds) + 1,
            timeout_keep_alive=75, h11_max_incomplete_event_size=64 * 1024,
        )  # fmt: skip
        host, port = listener.getsockname()[:2]
        url_host = f"[{host}]" if ":" in host else host
        print(f"http://{url_host}:{port}/v1/models/{options.name}:predict", flush=True)
        await GracefulServer(config, shutdown, options.leave_after).serve(sockets=[listener])

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
        sys.stdout.flush()
        os._exit(0)  # do not wait for model calls that have timed out


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m paceline.serve", description="Serve the newest model in a folder.")
    parser.add_argument("--base", type=Path, required=True, help="folder with one subfolder per model version")
    parser.add_argument("--name", required=True, help="model name in URLs")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8501, help="port to listen on (default: %(default)s)")
    parser.add_argument("--most-bytes", type=int, default=32 * 1024 * 1024, help="maximum size of a request body")
    parser.add_argument("--most-seconds", type=float, default=30.0, help="time limit of a request")
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
