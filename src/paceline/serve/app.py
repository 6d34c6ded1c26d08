"""The REST paths of the server: predict, status and metadata as TensorFlow Serving has them, health and metrics."""

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

from paceline.serve import signatures
from paceline.serve.batching import Batcher, Busy
from paceline.serve.leaving import Going, LastAnswers
from paceline.serve.loading import Model
from paceline.serve.metrics import Metrics
from paceline.serve.signatures import DEFAULT, BadRequest
from paceline.serve.versions import Versions

JSON = "application/json"
GAVE_UP = 499  # noted where a client hung up; nobody reads it


@dataclass(frozen=True)
class Limits:
    body: int = 32 * 1024 * 1024  # bytes of a request
    seconds: float = 30.0  # for a request, from its first byte to its answer
    batch: int = 64  # examples in a call of the model
    waiting: int = 4096  # examples that may wait


class Refused(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Server:
    def __init__(self, name: str, versions: Versions, metrics: Metrics, limits: Limits, going: Going) -> None:
        self._name, self._versions, self._metrics, self._limits = name, versions, metrics, limits
        self._going = going
        self._batcher = Batcher(limits.batch, limits.waiting, metrics.batch)

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
                Route("/metrics", self._counted),
                Route("/{rest:path}", self._unknown, methods=["GET", "POST", "PUT", "DELETE"]),
            ],
            middleware=[Middleware(LastAnswers, going=self._going)],
            lifespan=self._life,
        )

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(self._versions.follow())
        try:
            yield
        finally:
            following.cancel()
            self._batcher.close()

    # ---- predict

    async def _predict(self, request: Request) -> Response:
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(self._limits.seconds):
                answer = Response(orjson.dumps(await self._answer(request), option=_NUMPY), media_type=JSON)
        except BadRequest as error:
            answer = _error(400, str(error))
        except Refused as error:
            answer = _error(error.status, str(error))
        except Busy as error:
            answer = _error(503, f"{error}: try again later")
            answer.headers["Retry-After"] = "1"
        except TimeoutError:
            answer = _error(504, f"no answer within {self._limits.seconds:g} s")
        except ClientDisconnect:
            answer = _error(GAVE_UP, "")
        except Exception as error:
            # What a model cannot work on is the client's; a client reads the first line of why.
            kind = type(error).__name__
            theirs = kind in ("InvalidArgumentError", "ValueError", "IndexError", "TypeError")
            answer = _error(400 if theirs else 500, f"{kind}: {_first(error)}")
        self._metrics.requests[answer.status_code] += 1
        self._metrics.latency.note(time.perf_counter() - begin)
        return answer

    async def _answer(self, request: Request) -> dict[str, Any]:
        body = await self._body(request)
        try:
            asked = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the body is no JSON: {error}") from None
        if not isinstance(asked, dict):
            raise BadRequest('the body must be an object with "instances" or "inputs"')
        if ("instances" in asked) == ("inputs" in asked):
            raise BadRequest('the body must have one of "instances" and "inputs"')
        if more := sorted(set(asked) - {"instances", "inputs", "signature_name"}):
            raise BadRequest(f'the body has "{more[0]}"; known are "instances", "inputs" and "signature_name"')
        model = self._model(request)
        name = asked.get("signature_name") or self._only(model)
        signature = model.signatures.get(name) if isinstance(name, str) else None
        if signature is None:
            raise BadRequest(f'the model has no signature "{name}"; it has {", ".join(sorted(model.signatures))}')
        rows_asked = "instances" in asked
        read = signatures.from_rows if rows_asked else signatures.from_columns
        inputs, rows = read(signature, asked["instances" if rows_asked else "inputs"])
        outputs = await self._batcher.ask(model.calls[name], signature.joins, inputs, rows)
        if rows_asked:
            return {"predictions": signatures.to_rows(outputs, rows)}
        return {"outputs": signatures.to_columns(outputs)}

    async def _body(self, request: Request) -> bytes:
        most = self._limits.body
        told = request.headers.get("content-length", "")
        if told.isdecimal() and int(told) > most:
            raise Refused(413, f"the body has {told} bytes; {most} are allowed")
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise Refused(413, f"the body has more than {most} bytes")
            parts.append(part)
        return b"".join(parts)

    def _model(self, request: Request) -> Model:
        model, version = self._versions.model, request.path_params.get("version")
        if model is None:
            raise Refused(503, "no model is loaded yet")
        if version is not None and version != str(model.version):
            raise Refused(404, f"version {version} of {self._name} is not served; {model.version} is")
        return model

    def _only(self, model: Model) -> str:
        return DEFAULT if DEFAULT in model.signatures or len(model.signatures) != 1 else next(iter(model.signatures))

    # ---- about the model and the server

    async def _status(self, request: Request) -> Response:
        try:
            known = [(self._model(request).version, "AVAILABLE", "OK", "")]
        except Refused as error:
            if not self._versions.failed or "version" in request.path_params:
                return _error(error.status, str(error))
            known = []
        if "version" not in request.path_params:
            known += [(version, "END", "UNKNOWN", why) for version, why in self._versions.failed.items()]
        told = [
            {"version": str(version), "state": state, "status": {"error_code": code, "error_message": why}}
            for version, state, code, why in sorted(known, reverse=True)
        ]
        return _json({"model_version_status": told})

    async def _metadata(self, request: Request) -> Response:
        try:
            model = self._model(request)
        except Refused as error:
            return _error(error.status, str(error))
        return _json(signatures.metadata(self._name, model.version, model.signatures))

    async def _alive(self, request: Request) -> Response:
        return Response("alive\n", media_type="text/plain")

    async def _ready(self, request: Request) -> Response:
        why_not = "going" if self._going.told else "no model yet" if self._versions.model is None else ""
        return Response(f"{why_not or 'ready'}\n", 503 if why_not else 200, media_type="text/plain")

    async def _counted(self, request: Request) -> Response:
        model = self._versions.model
        text = self._metrics.text(None if model is None else model.version, self._batcher.rows)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _unknown(self, request: Request) -> Response:
        if request.url.path.endswith(":predict"):
            return _error(405, "predictions are asked for by POST")
        known = f"/v1/models/{self._name}, with :predict or /metadata behind it, /healthz, /readyz, /metrics"
        return _error(404, f"{request.url.path} is not served; {known} are")


_NUMPY = orjson.OPT_SERIALIZE_NUMPY


_ABOUT_THE_GRAPH = ("Graph execution error", "Detected at node", "File ", "<stack", "[[", "Node:")


def _first(error: Exception) -> str:
    """The line that says why: TensorFlow puts some about its graph around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith(_ABOUT_THE_GRAPH)), next(iter(lines), ""))[:500]


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type=JSON)


def _error(status: int, why: str) -> Response:
    return Response(orjson.dumps({"error": why}), status, media_type=JSON)
