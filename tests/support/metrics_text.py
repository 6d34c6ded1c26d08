"""Reads the text of metrics, strictly, and asks a server for it."""

from __future__ import annotations

import re
import socket

SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (\S+)')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\\n]|\\[\\"n])*)"')

Labels = frozenset[tuple[str, str]]
Samples = dict[tuple[str, Labels], float]


def parse(text: str) -> Samples:
    """OpenMetrics or the older format. AssertionError: it is invalid, or a sample is there twice."""
    samples: Samples = {}
    kinds: dict[str, str] = {}
    *lines, last = text.split("\n")
    assert last == ""
    for line in lines:
        if line == "# EOF":
            assert line is lines[-1]
        elif line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ")
            assert family not in kinds, f"{family} is there twice"
            kinds[family] = kind
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, labels = match[1], frozenset(LABEL.findall(match[2]))
            family = list(kinds)[-1]
            assert name in (family, f"{family}_total", f"{family}_info"), f"{name} is not below its family"
            assert (name, labels) not in samples, line
            samples[name, labels] = float(match[3])
    return samples


def value(samples: Samples, metric: str, /, **labels: str) -> float | None:
    """The value of the only sample of this name with these labels; None: there is none."""
    values = [
        each for (own, each_labels), each in samples.items() if own == metric and labels.items() <= set(each_labels)
    ]
    assert len(values) < 2, f"several samples of {metric}"
    return values[0] if values else None


def ask(
    port: int, request: bytes = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", limit: float = 20.0
) -> tuple[str, str]:
    """The head and the body of the response."""
    with socket.create_connection(("127.0.0.1", port), limit) as sock:
        sock.sendall(request)
        data = bytearray()
        while piece := sock.recv(65536):
            data += piece
    head, _, body = data.decode().partition("\r\n\r\n")
    return head, body
