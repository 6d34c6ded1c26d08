"""The server's metrics, in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            yield f'{name}_bucket{{le="{bound:g}"}} {total}'
        total += self._counts[-1]
        yield f'{name}_bucket{{le="+Inf"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()  # by status code
        self.latency = Histogram(SECONDS)
        self.batches = Histogram(ROWS)
        self.loads = 0
        self.load_failures = 0

    def batch(self, requests: int, rows: int) -> None:
        self.batches.add(rows)

    def text(self, version: int | None, waiting: int) -> str:
        lines = ["# HELP paceline_serve_requests_total Prediction requests, by response status.",
                 "# TYPE paceline_serve_requests_total counter"]  # fmt: skip
        lines += [f'paceline_serve_requests_total{{code="{code}"}} {n}' for code, n in sorted(self.requests.items())]
        for name, help_text, histogram in (
            ("paceline_serve_request_seconds", "Time from request to response.", self.latency),
            ("paceline_serve_batch_rows", "Examples per model call.", self.batches),
        ):
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} histogram", *histogram.lines(name)]
        for name, kind, help_text, value in (
            ("paceline_serve_waiting_rows", "gauge", "Examples waiting for the model.", waiting),
            ("paceline_serve_model_version", "gauge", "Step of the served model; 0: none yet.", version or 0),
            ("paceline_serve_loads_total", "counter", "Models loaded.", self.loads),
            ("paceline_serve_load_failures_total", "counter", "Models that failed to load.", self.load_failures),
        ):
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", f"{name} {value}"]
        return "\n".join(lines) + "\n"
