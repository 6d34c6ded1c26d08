"""`python -m paceline.serve`: serves the newest model of a folder; `paceline serve` and pods start it."""

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
    given = _options()
    os.environ.update(amx.environment(os.environ))  # before any framework is imported
    try:
        import uvicorn

        from paceline.serve.app import Limits, Server
        from paceline.serve.leaving import Going, Leaving
    except ImportError as error:
        _end(f"{sys.executable} has no {error.name}: pip install 'paceline[serve]'")
    from paceline.serve.metrics import Metrics
    from paceline.serve.versions import Versions

    metrics = Metrics()
    versions = Versions(given.base, metrics, _say)
    going = Going()

    async def serve() -> None:
        await versions.look()
        if versions.model is None:
            why = (
                "; ".join(versions.failed.values()) or f"{given.base} holds no version: a folder with a number as name"
            )
            _end(why)
        try:
            listener = socket.create_server((given.host, given.port), backlog=2048)
        except OSError as error:
            _end(f"port {given.port} of {given.host} cannot be used: {os.strerror(error.errno or 0)}")
        limits = Limits(given.most_bytes, given.most_seconds, given.batch, given.waiting)
        app = Server(given.name, versions, metrics, limits, going).app()
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=int(given.most_seconds) + 1,
            timeout_keep_alive=75, h11_max_incomplete_event_size=64 * 1024,
        )  # fmt: skip
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{port}/v1/models/{given.name}:predict", flush=True)
        await Leaving(config, going, given.leave_after).serve(sockets=[listener])

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
        sys.stdout.flush()
        os._exit(0)  # a call of the model whose time is over is not waited for


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(prog="python -m paceline.serve", description=__doc__)
    options.add_argument("--base", type=Path, required=True, help="a folder with a folder for each version")
    options.add_argument("--name", required=True, help="the model's name in paths")
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, default=8501)
    options.add_argument("--most-bytes", type=int, default=32 * 1024 * 1024, help="of a request")
    options.add_argument("--most-seconds", type=float, default=30.0, help="for a request")
    options.add_argument("--batch", type=int, default=64, help="examples in one call of the model")
    options.add_argument("--waiting", type=int, default=4096, help="examples that may wait")
    options.add_argument(
        "--leave-after", type=float, default=5.0, help="seconds that it answers after SIGTERM; Ctrl-C ends it at once"
    )
    return options.parse_args()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _end(why: str) -> NoReturn:
    _say(f"paceline serve: {why}")
    os._exit(1)


if __name__ == "__main__":
    main()
