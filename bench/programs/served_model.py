"""The digits network of examples/digits as a SavedModel, and a naive server that calls the model once per request."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

PIXELS = (28, 28, 1)


def write(folder: Path) -> None:
    import keras

    network = keras.Sequential(
        [
            keras.Input(PIXELS),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    network.save(folder / "model.keras")
    network.export(folder / "1", verbose=False)


def bare(folder: Path, seconds: float) -> None:
    """Examples per second of `model(...)` in one process: one at a time, and 64 at a time."""
    import keras

    model = keras.saving.load_model(folder / "model.keras")
    rates = {}
    for rows in (1, 64):
        images = np.random.default_rng(0).random((rows, *PIXELS), dtype="float32")
        model(images)
        calls, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            np.asarray(model(images))
            calls += 1
        rates[str(rows)] = calls * rows / (time.perf_counter() - begin)
    print(json.dumps(rates), flush=True)


def naive(folder: Path) -> None:
    """The same libraries as the server's, one call per request."""
    import keras
    import orjson
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    model = keras.saving.load_model(folder / "model.keras")

    def call(instances: Any) -> Any:
        return np.asarray(model(np.asarray(instances, "float32")))

    async def predict(request: Request) -> Response:
        instances = orjson.loads(await request.body())["instances"]
        answer = await run_in_threadpool(call, instances)
        return Response(orjson.dumps({"predictions": answer}, option=orjson.OPT_SERIALIZE_NUMPY))

    call(np.zeros((1, *PIXELS)).tolist())
    app = Starlette(routes=[Route("/v1/models/digits:predict", predict, methods=["POST"])])
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/v1/models/digits:predict", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, loop="uvloop", http="httptools")
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("what", choices=["write", "bare", "naive"])
    options.add_argument("folder", type=Path)
    options.add_argument("--seconds", type=float, default=5.0)
    args = options.parse_args()
    if args.what == "write":
        write(args.folder)
    elif args.what == "bare":
        bare(args.folder, args.seconds)
    else:
        naive(args.folder)
