"""Parameters and bodies of requests, checked; and endpoints whose errors become JSON."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.errors import PacelineError, UsageError
from paceline.page.http.errors import TooLarge, WrongMethod, WrongType, unreadable
from paceline.page.http.responses import error_response, json_response
from paceline.storage.json_values import parse_json

_MOST_BODY = 64 * 1024
_LONGEST = 1000  # characters of a parameter
_MOST_VALUES = 100  # of a parameter that may be repeated

Endpoint = Callable[[Request], Awaitable[Response]]
ReportBug = Callable[[BaseException], None]


class Handler:
    """An ASGI application for one path: calls the endpoint of the method."""

    def __init__(self, report_bug: ReportBug, **endpoints: Endpoint) -> None:
        """`endpoints`: by method, in lower case."""
        self._report_bug, self._endpoints = report_bug, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            method = "get" if scope["method"] == "HEAD" else scope["method"].lower()
            endpoint = self._endpoints.get(method)
            if endpoint is None:
                raise WrongMethod(f"{scope['method'][:20]} is not supported here")
            response = await endpoint(Request(scope, receive))
        except (ClientDisconnect, asyncio.CancelledError):
            raise
        except PacelineError as error:
            response = error_response(error)
        except OSError as error:
            response = error_response(unreadable(error))
        except Exception as error:
            self._report_bug(error)
            what = f"this is a bug in Paceline: {type(error).__name__}"
            form = {"kind": "Bug", "what": what, "where": "", "remedy": "the terminal of `paceline page` shows more"}
            response = json_response({"error": form}, 500)
        if scope["method"] == "HEAD" and isinstance(response, StreamingResponse):
            response = Response(None, response.status_code, dict(response.headers))  # a stream would never end
        await response(scope, receive, send)


def text(request: Request, name: str, default: str = "") -> str:
    value = request.query_params.get(name, default)
    if len(value) > _LONGEST or "\0" in value:
        raise UsageError("invalid value", where=name, remedy=f"use at most {_LONGEST} characters")
    return value


def texts(request: Request, name: str) -> list[str]:
    values = request.query_params.getlist(name)
    if len(values) > _MOST_VALUES or any(len(value) > _LONGEST for value in values):
        raise UsageError("too many values, or too long ones", where=name)
    return [value for value in values if value]


def number(request: Request, name: str, default: float | None = None) -> float | None:
    value = text(request, name)
    if not value:
        return default
    try:
        parsed = float(value)
    except ValueError:
        parsed = math.nan
    if not abs(parsed) < 1e15:  # also if it is not a number
        raise UsageError("not a number", where=f"{name}={value[:40]}")
    return parsed


def integer(request: Request, name: str, default: int, least: int, most: int) -> int:
    value = text(request, name)
    if not value:
        return default
    if not (value.isascii() and value.isdecimal() and len(value) < 19 and least <= int(value) <= most):
        raise UsageError("invalid value", where=f"{name}={value[:40]}", remedy=f"use {least} to {most}")
    return int(value)


def flag(request: Request, name: str) -> bool:
    value = text(request, name)
    if value not in ("", "0", "1"):
        raise UsageError("invalid value", where=f"{name}={value[:40]}", remedy="use 0 or 1")
    return value == "1"


async def body(request: Request) -> bytes:
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MOST_BODY:
            raise TooLarge(f"the body has more than {_MOST_BODY} bytes")
    return data


async def json_body(request: Request) -> dict[str, Any]:
    """A JSON object; no body: an empty one."""
    data = await body(request)
    if not data:
        return {}
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise WrongType("the body is not JSON", remedy="send it with Content-Type: application/json")
    try:
        fields = parse_json(data)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise UsageError("the body is not a JSON object")
    return fields
