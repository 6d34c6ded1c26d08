"""Sends the notifications of a run to one receiver, in order, and tries again until the receiver accepts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Callable

from paceline.agent.deliveries import addresses, http_requests
from paceline.agent.deliveries.event_reader import EventReader
from paceline.agent.deliveries.http_requests import DeliveryError
from paceline.agent.deliveries.notifications import Notification, notification
from paceline.agent.deliveries.schedule import Schedule
from paceline.plan import Webhook

GIVE_UP_S = 3600.0  # seconds after which a notification that was not accepted is dropped
WARN_AFTER = 3  # attempts


class WebhookDelivery:
    """`run` is called in a thread of its own, `undelivered` by another one at the end."""

    def __init__(
        self, webhook: Webhook, name: str, reader: EventReader, run: str, job: str,
        environment: Mapping[str, str], schedule: Schedule, warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`name`: for messages, such as notify[0]."""
        self._webhook, self._reader, self._run, self._job = webhook, reader, run, job
        self._schedule, self._warn = schedule, warn
        self._url = addresses.address_of(webhook, environment)
        self._invalid = _invalid(webhook, self._url)
        self.name = name if self._invalid else f"{name} ({addresses.host_of(self._url)})"
        self._problem = ""  # why the last attempt failed
        self._dropped = 0

    def run(self) -> None:
        if self._invalid:
            self._warn(f"{self.name}: {self._invalid}; no notifications are sent to it")
            self._problem = self._invalid
            return
        while True:
            is_last = self._schedule.is_ending
            events = self._reader.read()
            for event, position in events:
                message = self._message(event)
                if message is not None and not self._deliver(message):
                    return  # no time is left
                self._reader.advance(position)
                if message is not None:
                    self._reader.save()
            if events:
                continue
            self._reader.save()
            if is_last:
                return
            self._schedule.wait()

    def undelivered(self) -> str:
        """What the receiver did not accept, as a text; empty: nothing. It reads the rest of the events."""
        count = self._dropped
        while events := self._reader.read():
            count += sum(self._message(event) is not None for event, _ in events)
            self._reader.advance(events[-1][1])
        if count == 0:
            return ""
        things = "1 notification was" if count == 1 else f"{count} notifications were"
        return f"{things} not delivered to {self.name}" + (f": {self._problem}" if self._problem else "")

    def _message(self, event: dict[str, object]) -> Notification | None:
        message = notification(event, self._run, self._job)
        return message if message is not None and message.kind in self._webhook.on else None

    def _deliver(self, message: Notification) -> bool:
        """False: the run has ended, and no time is left. A notification that is not accepted for long is dropped."""
        data = message.encoded(self._webhook.format)
        headers = {"Content-Type": "application/json", "Paceline-Notification": message.id}
        began = self._schedule.now()
        for attempt in range(1, 1_000_000):
            try:
                http_requests.send("POST", self._url, data, headers)
                self._problem = ""
                return True
            except DeliveryError as error:
                self._problem = str(error)
                if not error.retry or self._schedule.now() - began > GIVE_UP_S:
                    self._dropped += 1
                    self._warn(f"{self.name} did not accept a notification ({message.kind}), which is dropped: {error}")
                    return True
                if attempt == WARN_AFTER:
                    self._warn(f"cannot send notifications to {self.name}: {error}; retrying")
                if not self._schedule.wait_to_retry(attempt, error.delay):
                    return False
        return False


def _invalid(webhook: Webhook, url: str) -> str:
    if webhook.url_from and not url:
        return f"the variable {webhook.url_from} is not set"
    problem = addresses.problem_with(url)
    return f"the address in {webhook.url_from or 'url'} {problem}" if problem else ""
