"""The part of MLflow's REST API that tracking needs (/api/2.0/mlflow)."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

from paceline.agent.deliveries import http_requests
from paceline.agent.deliveries.http_requests import DeliveryError
from paceline.agent.fast_dataclass import record
from paceline.storage.json_values import parse_json

MOST_METRICS = 1000  # in one request; MLflow accepts no more
MOST_OTHERS = 100  # parameters or tags in one request
LONGEST_NAME = 250  # characters
LONGEST_PARAMETER = 500  # characters: older servers accept no more
LONGEST_TAG = 5000
_NOT_MLFLOW = "its response is not in MLflow's format"
_NAME = re.compile(r"[^\w\-. /]", re.ASCII)
_RUN_ID = re.compile(r"[\w\-]{1,128}", re.ASCII)


@record
class Metric:
    key: str
    value: float
    step: int
    timestamp: int  # milliseconds since 1970


@contextmanager
def _reading_responses() -> Iterator[None]:
    """A response without the fields that MLflow's has may come from a proxy, or from another server."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        raise DeliveryError(_NOT_MLFLOW) from None


class MlflowServer:
    def __init__(self, uri: str, environment: Mapping[str, str]) -> None:
        """`environment`: may contain credentials, as MLflow's own clients read them."""
        self._uri = uri.rstrip("/")
        self._headers = {"Content-Type": "application/json", **_authorization(environment)}

    @_reading_responses()
    def experiment(self, name: str) -> str:
        """The id of the experiment, which is created if it does not exist."""
        try:
            experiment = self._get("experiments/get-by-name", experiment_name=name)["experiment"]
        except DeliveryError as error:
            if error_code(error) != "RESOURCE_DOES_NOT_EXIST":
                raise
            # If another run creates it at the same time, this fails, and the next attempt finds it.
            return str(self._post("experiments/create", {"name": name})["experiment_id"])
        if experiment.get("lifecycle_stage") == "deleted":
            raise DeliveryError(f"the experiment {name} was deleted: restore it, or use another one", retry=False)
        return str(experiment["experiment_id"])

    @_reading_responses()
    def find_run(self, experiment: str, tag: str, value: str) -> str:
        """The id of the run with this tag; empty: there is none."""
        wanted = {"experiment_ids": [experiment], "filter": f"tags.`{tag}` = '{value}'", "max_results": 1}
        runs = self._post("runs/search", wanted).get("runs") or []
        return _run_id(runs[0]) if runs else ""

    @_reading_responses()
    def create_run(self, experiment: str, name: str, start_time: int, tags: Mapping[str, str]) -> str:
        fields = {"experiment_id": experiment, "run_name": name, "start_time": start_time, "tags": _pairs(tags)}
        return _run_id(self._post("runs/create", fields)["run"])

    @_reading_responses()
    def highest_steps(self, run: str) -> dict[str, int]:
        """The highest step of each metric of a run."""
        metrics = self._get("runs/get", run_id=run)["run"].get("data", {}).get("metrics") or []
        return {str(each["key"]): int(each.get("step") or 0) for each in metrics}

    def log_metrics(self, run: str, metrics: list[Metric]) -> None:
        for begin in range(0, len(metrics), MOST_METRICS):
            batch = [dict(vars(each)) for each in metrics[begin : begin + MOST_METRICS]]
            self._post("runs/log-batch", {"run_id": run, "metrics": batch})

    def log_parameters(self, run: str, parameters: Mapping[str, str]) -> None:
        self._log_pairs(run, "params", {name: value[:LONGEST_PARAMETER] for name, value in parameters.items()})

    def set_tags(self, run: str, tags: Mapping[str, str]) -> None:
        self._log_pairs(run, "tags", tags)

    def end_run(self, run: str, status: str, end_time: int) -> None:
        self._post("runs/update", {"run_id": run, "status": status, "end_time": end_time})

    def _log_pairs(self, run: str, field: str, values: Mapping[str, str]) -> None:
        pairs = _pairs(values)
        for begin in range(0, len(pairs), MOST_OTHERS):
            self._post("runs/log-batch", {"run_id": run, field: pairs[begin : begin + MOST_OTHERS]})

    def _get(self, path: str, **query: str) -> dict[str, Any]:
        return self._response("GET", f"{path}?{urlencode(query)}", None)

    def _post(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return self._response("POST", path, json.dumps(fields).encode())

    def _response(self, method: str, path: str, data: bytes | None) -> dict[str, Any]:
        try:
            response = parse_json(http_requests.send(method, f"{self._uri}/api/2.0/mlflow/{path}", data, self._headers))
        except ValueError:
            response = None
        except DeliveryError as error:
            raise _with_message(error) from None
        if not isinstance(response, dict):
            raise DeliveryError(_NOT_MLFLOW)
        return response


def _run_id(run: Mapping[str, Any]) -> str:
    """It is shown, and becomes part of the environment of all tasks, which could not start with some values."""
    number = run["info"]["run_id"]
    if not isinstance(number, str) or not _RUN_ID.fullmatch(number):
        raise ValueError("not the id of a run")
    return number


def valid_name(name: str) -> str:
    """The name with the characters that MLflow accepts, and as a path without empty parts, `.` or `..`: MLflow refuses
    all numbers of a request if the name of one is not.

    >>> valid_name("loss@worker/0"), valid_name("/a//../b.c")
    ('loss_worker/0', 'a/_/b.c')
    """
    parts = _NAME.sub("_", name)[:LONGEST_NAME].split("/")
    return "/".join("_" if part in (".", "..") else part for part in parts if part) or "_"


def is_refusal(error: DeliveryError) -> bool:
    """Whether the server will never accept what was sent. Credentials may be renewed, and a proxy may not find a server
    that is being restarted: such requests can succeed later."""
    if error.status in (401, 403, 407) or (error.status == 404 and not error_code(error)):
        return False
    return 400 <= error.status < 500 and not error.retry


def error_code(error: DeliveryError) -> str:
    return str(_details(error).get("error_code", ""))


def _with_message(error: DeliveryError) -> DeliveryError:
    """With what MLflow says about it."""
    message = str(_details(error).get("message", "")).split("\n")[0][:300]
    text = f"{error}: {message}" if message else str(error)
    return DeliveryError(text, error.status, error.body, error.retry, error.delay)


def _details(error: DeliveryError) -> dict[str, Any]:
    try:
        details = parse_json(error.body)
    except ValueError:
        return {}
    return details if isinstance(details, dict) else {}


def _pairs(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": valid_name(name), "value": value[:LONGEST_TAG]} for name, value in values.items()]


def _authorization(environment: Mapping[str, str]) -> dict[str, str]:
    name, password = (environment.get(f"MLFLOW_TRACKING_{part}", "") for part in ("USERNAME", "PASSWORD"))
    if name or password:
        return {"Authorization": f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"}
    token = environment.get("MLFLOW_TRACKING_TOKEN", "").strip()
    return {"Authorization": f"Bearer {token}"} if token else {}
