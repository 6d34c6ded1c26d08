"""The server's REST API: predict, status and metadata as in TensorFlow Serving, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from paceline.serve import request_json, signatures
from paceline.serve.batching import Batcher, Busy
from paceline.serve.graceful_exit import CloseConnections, Shutdown
from paceline.serve.json_process import JsonProcess, TooComplex
from paceline.serve.listening import HostCheck
from paceline.serve.memory import Memory, OutOfMemory, Reservation
from paceline.serve.metrics import Metrics
from paceline.serve.model_loading import Model
from paceline.serve.request_body import Refused, read_body
from paceline.serve.signatures import BadRequest
from paceline.serve.versions import Versions

JSON = "application/json"
_PIECE = 256 * 1024  # bytes of a response that are sent at a time
CLIENT_CLOSED = 499  # counted in metrics when the client disconnected; never sent


@dataclass(frozen=True)
class Limits:
    body: int = 32 * 1024 * 1024  # bytes of a request
    seconds: float = 30.0  # per request, from its first byte to the response
    batch: int = 64  # examples per model call
    waiting: int = 4096  # maximum number of waiting examples
    memory: int = 128 * 1024 * 1024  # bytes of all requests and responses together
    large: int = 256 * 1024  # bytes; larger JSON is read and written by another process


class Server:
    def __init__(
        self,
        name: str,
        versions: Versions,
        metrics: Metrics,
        limits: Limits,
        shutdown: Shutdown,
        hosts: frozenset[str] = frozenset(),
    ) -> None:
        """`hosts`: names that requests may use in their Host header; empty: any."""
        self._name, self._versions, self._metrics, self._limits = name, versions, metrics, limits
        self._shutdown, self._hosts = shutdown, hosts
        self._batcher = Batcher(limits.batch, limits.waiting, metrics.batch)
        self._memory = Memory(limits.memory)
        self._json = JsonProcess()

    def app(self) -> Starlette:
        model = f"/v1/models/{self._name}"
        return Starlette(
            routes=[
                Route(model, self._status),
                Route(f"{model}/versions/{{version}}", self._status),
                Route(f"{model}/metadata", self._metadata),
                Route(f"{model}/versions/{{version}}/metadata", self._metadata),
                Route(f"{model}:predict", self._predict, methods=["POST"]),
                Route(f"{model}/versions/{{version}}:predict", self._predict, methods=["POST"]),
                Route("/healthz", self._alive),
                Route("/readyz", self._ready),
                Route("/metrics", self._show_metrics),
                Route("/{rest:path}", self._unknown, methods=["GET", "POST", "PUT", "DELETE"]),
            ],
            middleware=[
                Middleware(CloseConnections, shutdown=self._shutdown),
                Middleware(HostCheck, hosts=self._hosts),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        watcher = asyncio.create_task(self._versions.watch())
        try:
            yield
        finally:
            watcher.cancel()
            self._batcher.close()
            self._json.close()

    # ---- predict

    async def _predict(self, request: Request) -> Response:
        started = time.perf_counter()
        reservation = self._memory.reserve()
        body: bytes | None = None
        try:
            async with asyncio.timeout(self._limits.seconds):
                body = await read_body(request, self._limits.body, reservation)
                content = await self._reply(request, body)
            reservation.add(len(content), is_limited=False)
            response: Response = _Reply(content, reservation)
        except BadRequest as error:
            response = _error(400, str(error))
        except Refused as error:
            response = _error(error.status, str(error))
        except TooComplex as error:
            response = _error(413, str(error))
        except (Busy, OutOfMemory) as error:
            response = _error(503, f"{error}; try again later")
            response.headers["Retry-After"] = "1"
        except TimeoutError:
            seconds = f"within {self._limits.seconds:g} s"
            response = _error(504, f"no response {seconds}") if body is not None else _late(seconds)
        except ClientDisconnect:
            response = _error(CLIENT_CLOSED, "")
        except Exception as error:
            # Input that the model cannot process is the client's error; the client gets the first line of the reason.
            kind = type(error).__name__
            is_client_error = kind in ("InvalidArgumentError", "ValueError", "IndexError", "TypeError")
            response = _error(400 if is_client_error else 500, f"{kind}: {_reason(error)}")
        if not isinstance(response, _Reply):
            reservation.release()
        self._metrics.requests[response.status_code] += 1
        self._metrics.latency.add(time.perf_counter() - started)
        return response

    async def _reply(self, request: Request, body: bytes) -> bytes:
        model = self._model(request)
        inputs = await self._call_json(len(body), "parse", body, model.signatures)
        signature = model.signatures[inputs.signature]
        outputs = await self._batcher.predict(
            model.calls[inputs.signature], signature.can_batch, inputs.arrays, inputs.rows
        )
        size = sum(each.nbytes for each in outputs.values())
        content: bytes = await self._call_json(size, "encode", outputs, inputs.by_row, inputs.rows)
        return content

    async def _call_json(self, size: int, function: str, *args: Any) -> Any:
        if size > self._limits.large:
            return await self._json.call(function, *args)
        return getattr(request_json, function)(*args)

    def _model(self, request: Request) -> Model:
        model, version = self._versions.model, request.path_params.get("version")
        if model is None:
            raise Refused(503, "no model is loaded yet")
        if version is not None and version != str(model.version):
            raise Refused(
                404, f"version {version} of {self._name} is not served; the served version is {model.version}"
            )
        return model

    # ---- about the model and the server

    async def _status(self, request: Request) -> Response:
        try:
            states = [(self._model(request).version, "AVAILABLE", "OK", "")]
        except Refused as error:
            if not self._versions.failed or "version" in request.path_params:
                return _error(error.status, str(error))
            states = []
        if "version" not in request.path_params:
            states += [(version, "END", "UNKNOWN", reason) for version, reason in self._versions.failed.items()]
        statuses = [
            {"version": str(version), "state": state, "status": {"error_code": code, "error_message": reason}}
            for version, state, code, reason in sorted(states, reverse=True)
        ]
        return _json({"model_version_status": statuses})

    async def _metadata(self, request: Request) -> Response:
        try:
            model = self._model(request)
        except Refused as error:
            return _error(error.status, str(error))
        return _json(signatures.metadata(self._name, model.version, model.signatures))

    async def _alive(self, request: Request) -> Response:
        return Response("alive\n", media_type="text/plain")

    async def _ready(self, request: Request) -> Response:
        problem = (
            "shutting down" if self._shutdown.requested else "no model yet" if self._versions.model is None else ""
        )
        return Response(f"{problem or 'ready'}\n", 503 if problem else 200, media_type="text/plain")

    async def _show_metrics(self, request: Request) -> Response:
        model = self._versions.model
        text = self._metrics.text(None if model is None else model.version, self._batcher.rows)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _unknown(self, request: Request) -> Response:
        if request.url.path.endswith(":predict"):
            return _error(405, "predictions require POST")
        model = f"/v1/models/{self._name}"
        paths = f"{model}, {model}:predict, {model}/metadata, /healthz, /readyz, /metrics"
        return _error(404, f"{request.url.path} does not exist; the paths are {paths}")


class _Reply(Response):
    """Sent in pieces: what the client has not taken yet stays in the memory that the server counts."""

    def __init__(self, content: bytes, reservation: Reservation) -> None:
        super().__init__(content, media_type=JSON)
        self._reservation = reservation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, len(self.body), _PIECE):
                piece = self.body[start : start + _PIECE]
                is_last = start + _PIECE >= len(self.body)
                await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
        finally:
            self._reservation.release()


_GRAPH_DETAILS = ("Graph execution error", "Detected at node", "File ", "<stack", "[[", "Node:")


def _reason(error: Exception) -> str:
    """The line with the reason: TensorFlow surrounds it with details of its graph."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith(_GRAPH_DETAILS)), next(iter(lines), ""))[:500]


def _late(seconds: str) -> Response:
    return _error(408, f"the request was not complete {seconds}")


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type=JSON)


def _error(status: int, message: str) -> Response:
    return Response(orjson.dumps({"error": message}), status, media_type=JSON)
