"""Runs the credential plugin of a kubeconfig (`exec`), as kubectl does."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from typing import IO, Any

from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import UserExec
from lightkube.core.exceptions import ConfigError

LIMIT_S = 180.0  # a plugin may wait for a login in a browser
_MOST_OUTPUT = 4 * 1024 * 1024  # bytes
_LONGEST = 500  # characters of its errors


def run(single: SingleConfig, plugin: UserExec) -> dict[str, Any]:
    """The `status` of what it prints. Raises ConfigError."""
    is_interactive = sys.stdin is not None and sys.stdin.isatty()
    info = {"apiVersion": plugin.apiVersion, "kind": "ExecCredential", "spec": {"interactive": is_interactive}}
    variables = {each.name: each.value for each in plugin.env or []}
    environment = {**os.environ, **variables, "KUBERNETES_EXEC_INFO": json.dumps(info)}
    program = str(single.abs_file(plugin.command)) if os.sep in plugin.command else plugin.command
    try:
        # Files, not pipes: a process that the plugin leaves running would keep these open. No input, unless it is a
        # terminal: what is piped into this process is not for the plugin.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            exit_code = subprocess.run(
                [program, *(plugin.args or [])], env=environment, stdin=None if is_interactive else subprocess.DEVNULL,
                stdout=output, stderr=errors, timeout=LIMIT_S, check=False,
            ).returncode  # fmt: skip
            stdout, stderr = (_beginning(file) for file in (output, errors))
    except FileNotFoundError:
        hint = f": {_short(plugin.installHint)}" if plugin.installHint else ""
        raise ConfigError(f"the credential plugin {plugin.command} does not exist{hint}") from None
    except OSError as error:
        raise ConfigError(f"the credential plugin {plugin.command} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the credential plugin {plugin.command} did not finish within {LIMIT_S:g} s") from None
    if exit_code:
        text = _short(stderr.decode(errors="replace"))
        raise ConfigError(f"the credential plugin {plugin.command} failed with exit code {exit_code}: {text}")
    try:
        status = json.loads(stdout)["status"]
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


def _beginning(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(_MOST_OUTPUT)


def _short(text: str) -> str:
    return " ".join(text.split())[-_LONGEST:]
