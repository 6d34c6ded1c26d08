"""Runs the credential plugin of a kubeconfig (`exec`), as kubectl does."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import UserExec
from lightkube.core.exceptions import ConfigError

LIMIT_S = 180.0  # a plugin may wait for a login in a browser
_LONGEST = 500  # characters of its errors


def run(single: SingleConfig, plugin: UserExec) -> dict[str, Any]:
    """The `status` of what it prints. Raises ConfigError."""
    info = {"apiVersion": plugin.apiVersion, "kind": "ExecCredential", "spec": {"interactive": sys.stdin.isatty()}}
    variables = {each.name: each.value for each in plugin.env or []}
    environment = {**os.environ, **variables, "KUBERNETES_EXEC_INFO": json.dumps(info)}
    program = str(single.abs_file(plugin.command)) if os.sep in plugin.command else plugin.command
    try:
        finished = subprocess.run(
            [program, *(plugin.args or [])], env=environment, capture_output=True, timeout=LIMIT_S, check=False
        )
    except FileNotFoundError:
        hint = f": {_short(plugin.installHint)}" if plugin.installHint else ""
        raise ConfigError(f"the credential plugin {plugin.command} does not exist{hint}") from None
    except OSError as error:
        raise ConfigError(f"the credential plugin {plugin.command} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the credential plugin {plugin.command} did not finish within {LIMIT_S:g} s") from None
    if finished.returncode:
        text = _short(finished.stderr.decode(errors="replace"))
        raise ConfigError(f"the credential plugin {plugin.command} failed with exit code {finished.returncode}: {text}")
    try:
        status = json.loads(finished.stdout)["status"]
    except (ValueError, KeyError, TypeError, RecursionError):
        status = None
    if not isinstance(status, dict) or not (status.get("token") or status.get("clientCertificateData")):
        raise ConfigError(f"the credential plugin {plugin.command} printed no credential")
    return status


def expiry(status: dict[str, Any]) -> float:
    """When the credential expires, in seconds since 1970."""
    try:
        at = datetime.fromisoformat(str(status["expirationTimestamp"]))
    except (KeyError, ValueError):
        return math.inf
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _short(text: str) -> str:
    return " ".join(text.split())[-_LONGEST:]
