"""The process that delivers to external servers: one thread for each receiver, so that none waits for another.

It prints JSON objects, one per line, for the captain: `warning` is a text for the user, `mlflow_run` the id of the
MLflow run. Once a line is written to its standard input, the run has ended; its last line is `undelivered`, a list of
texts. If standard input is closed, the captain has ended, and so does this process."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from typing import Any

from paceline.agent.deliveries.event_reader import EventReader
from paceline.agent.deliveries.mlflow_delivery import MlflowDelivery
from paceline.agent.deliveries.mlflow_server import MlflowServer
from paceline.agent.deliveries.saved_state import FOLDER
from paceline.agent.deliveries.schedule import Schedule
from paceline.agent.deliveries.webhook_delivery import WebhookDelivery
from paceline.agent.options import parse
from paceline.plan import from_data


def main(argument: str) -> int:
    """`argument`: the captain's options."""
    options = parse(argument)
    with open(options.plan) as file:
        plan = from_data(json.load(file))
    folder, schedule = f"{options.folder}/{FOLDER}", Schedule()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    deliveries: list[WebhookDelivery | MlflowDelivery] = [
        WebhookDelivery(
            webhook, f"notify[{number}]", EventReader(options.folder, f"{folder}/notify-{number}.json"), options.run,
            plan.name, os.environ, schedule, _warn,
        )
        for number, webhook in enumerate(plan.notify)
    ]  # fmt: skip
    if plan.track is not None:
        server = MlflowServer(plan.track.mlflow, os.environ)
        user = "" if options.echo else os.environ.get("USER", "")
        deliveries.append(MlflowDelivery(plan, options, server, schedule, _warn, _announce, user))
    threads = [threading.Thread(target=_run, args=(delivery,), daemon=True) for delivery in deliveries]
    for thread in threads:
        thread.start()
    if not sys.stdin.readline():
        os._exit(0)
    threading.Thread(target=_exit_with_captain, daemon=True).start()
    schedule.end()
    for thread in threads:
        thread.join(max(0.0, schedule.time_left()))
    schedule.close()
    _print({"undelivered": [*filter(None, (delivery.undelivered() for delivery in deliveries))]})
    os._exit(0)  # a thread may still wait for its server


def _run(delivery: WebhookDelivery | MlflowDelivery) -> None:
    try:
        delivery.run()
    except BaseException:
        traceback.print_exc()
        os._exit(70)  # the captain starts this process again


def _exit_with_captain() -> None:
    sys.stdin.read()
    os._exit(0)


def _warn(text: str) -> None:
    _print({"warning": text})


def _announce(run: str) -> None:
    _print({"mlflow_run": run})


_printing = threading.Lock()


def _print(message: dict[str, Any]) -> None:
    with _printing:
        try:
            print(json.dumps(message), flush=True)
        except OSError:
            os._exit(0)  # the captain has ended
