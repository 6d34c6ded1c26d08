"""From the JSON of a request to arrays, and from arrays to the JSON of a response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from paceline.serve import signatures
from paceline.serve.signatures import DEFAULT, Arrays, BadRequest, Signature


@dataclass(frozen=True)
class Inputs:
    signature: str
    by_row: bool
    arrays: Arrays
    rows: int


def parse(body: bytes, known: Mapping[str, Signature]) -> Inputs:
    """`known`: the signatures of the model. Raises BadRequest."""
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(payload, dict):
        raise BadRequest('the body must be an object with "instances" or "inputs"')
    if ("instances" in payload) == ("inputs" in payload):
        raise BadRequest('the body must contain either "instances" or "inputs"')
    if unknown := sorted(set(payload) - {"instances", "inputs", "signature_name"}):
        raise BadRequest(f'unknown field "{unknown[0]}"; use "instances", "inputs" and "signature_name"')
    name = payload.get("signature_name") or _default(known)
    signature = known.get(name) if isinstance(name, str) else None
    if signature is None:
        raise BadRequest(f'the model has no signature "{name}"; it has {", ".join(sorted(known))}')
    by_row = "instances" in payload
    read = signatures.from_rows if by_row else signatures.from_columns
    arrays, rows = read(signature, payload["instances" if by_row else "inputs"])
    return Inputs(name, by_row, arrays, rows)


def encode(outputs: Arrays, by_row: bool, rows: int) -> bytes:
    """Raises BadRequest if the outputs do not have one row per example."""
    reply: dict[str, Any]
    if by_row:
        reply = {"predictions": signatures.to_rows(outputs, rows)}
    else:
        reply = {"outputs": signatures.to_columns(outputs)}
    return orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)


def _default(known: Mapping[str, Signature]) -> str:
    return DEFAULT if DEFAULT in known or len(known) != 1 else next(iter(known))
