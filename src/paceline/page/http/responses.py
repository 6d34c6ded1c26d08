"""JSON responses and server-sent events. Output of programs is only ever sent as JSON."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from paceline.client.json_form import finite
from paceline.errors import PacelineError
from paceline.page.http.errors import status_of
from paceline.view.text.option_names import reword


def json_bytes(data: Any) -> bytes:
    """`<` is escaped, so that the text is harmless even where it is taken for HTML."""
    text = json.dumps(finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    return text.replace("<", "\\u003c").encode("utf-8", "backslashreplace")


def json_response(data: Any, status: int = 200) -> Response:
    return Response(json_bytes(data), status, {"cache-control": "no-store"}, "application/json")


def error_fields(error: PacelineError) -> dict[str, Any]:
    reword(error)
    return error.fields()


def error_form(error: PacelineError) -> dict[str, Any]:
    return {"error": error_fields(error)}


def error_response(error: PacelineError) -> Response:
    response = json_response(error_form(error), status_of(error))
    if response.status_code in (429, 503):
        response.headers["retry-after"] = "1"
    return response


def sse(event: str, data: Any) -> bytes:
    """JSON has no line ends, so an event is always one line."""
    return b"event: " + event.encode() + b"\ndata: " + json_bytes(data) + b"\n\n"


KEEP_ALIVE = b": \n\n"
