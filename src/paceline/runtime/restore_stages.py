"""Reports to the agent when a helper begins to restore a task's state, and when it has."""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar, cast

from paceline.runtime.report import send_to_agent

Restore = TypeVar("Restore", bound=Callable[..., Any])


def reported(restore: Restore) -> Restore:
    @functools.wraps(restore)
    def restore_and_report(*args: Any, **kwargs: Any) -> Any:
        send_to_agent({"_": "start", "stage": "restoring"})
        result = restore(*args, **kwargs)
        send_to_agent({"_": "start", "stage": "restored"})
        return result

    return cast("Restore", restore_and_report)
