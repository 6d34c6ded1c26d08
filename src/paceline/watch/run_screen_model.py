"""What the screen of a run shows, as data: from the status of the run, its history and its curves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from paceline.view.text.wording import count, figure, metrics, size, span
from paceline.watch.curves import Period, Point
from paceline.watch.history import Generation, SnapshotRecord
from paceline.watch.tables import BAD, BOLD, DIM, GOOD, NAME, WARN, Column, Row, Span, Table, plain

STATUS_STYLES = {
    "running": GOOD, "succeeded": GOOD, "starting": WARN, "paused": WARN, "stopped": WARN, "failed": BAD,
    "damaged": BAD, "abandoned": BAD, "deleted": BAD,
}  # fmt: skip
_TASK_STYLES = {
    "running": GOOD, "succeeded": GOOD, "failed": BAD, "absent": WARN, "waiting": WARN, "starting": WARN, "ended": DIM,
}  # fmt: skip
ORDERS = ("name", "state", "step", "cpu", "memory")
_TROUBLE_FIRST = ("failed", "absent", "waiting", "starting", "ended", "running", "succeeded")


@dataclass(frozen=True)
class TaskData:
    name: str
    state: str
    host: str = ""
    generation: int = 0
    step: int | None = None
    cpu: float | None = None  # cores
    memory: float | None = None  # bytes
    memory_limit: float | None = None
    gpu: float | None = None  # share of the time in which its GPUs are busy
    gpu_memory: float | None = None  # bytes
    exit: str = ""


@dataclass(frozen=True)
class CurveData:
    """A series and its last value."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class RunData:
    """All that is known of a run at one moment."""

    run: str
    status: str
    reason: str = ""
    where: str = ""  # the cluster and namespace; empty: this machine
    began: float | None = None  # seconds since 1970
    ended: float | None = None
    step: int = 0
    total_steps: int | None = None
    steps_per_s: float | None = None
    metrics: tuple[tuple[str, float], ...] = ()  # of the leading task, the loss first
    goodput: float | None = None
    restarts: int = 0
    is_alive: bool = False
    tasks: tuple[TaskData, ...] = ()
    curves: tuple[CurveData, ...] = ()
    generations: tuple[Generation, ...] = ()  # oldest first
    marks: tuple[tuple[float, str], ...] = ()  # see History.marks
    snapshots: tuple[SnapshotRecord, ...] = ()  # newest first
    best: str = ""
    notes: tuple[str, ...] = ()  # why something is missing


def title(data: RunData, now: float) -> list[Span]:
    """The first line: digits-3f9a  running for 2 h 10 min  3 restarts  goodput 92.4%."""
    parts = [Span(plain(data.run), BOLD), Span(data.status, STATUS_STYLES.get(data.status, ""))]
    if data.began is not None and data.status not in ("damaged", "abandoned", "deleted"):
        parts.append(Span(span(round((data.ended or max(now, data.began)) - data.began))))
    parts.append(Span(count(data.restarts, "restart"), WARN if data.restarts else ""))
    parts += [Span(f"goodput {data.goodput:.1%}")] if data.goodput is not None else []
    parts += [Span(plain(data.where), DIM)] if data.where else []
    return parts


def progress(data: RunData) -> list[Span]:
    """The second line: step 1200 of 50000  31.2 steps/s  26 min left  loss 0.3123, and other metrics."""
    of = f" of {data.total_steps}" if data.total_steps else ""
    parts = [Span(f"step {data.step}{of}")] if data.step or data.total_steps else [Span("no steps yet", DIM)]
    if data.steps_per_s:
        parts.append(Span(f"{figure(data.steps_per_s)} steps/s"))
    left = time_left(data)
    parts += [Span(f"{span(left)} left", BOLD)] if left is not None else []
    return parts + [Span(metrics({name: value})) for name, value in data.metrics]


def time_left(data: RunData) -> float | None:
    """Seconds until the last step, at the current speed; None: unknown."""
    if not data.is_alive or not data.total_steps or not data.steps_per_s or data.step > data.total_steps:
        return None
    left = (data.total_steps - data.step) / data.steps_per_s
    return left if left < 10 * 365 * 86400 else None


def reason(data: RunData) -> Span:
    """Why the run has ended or what it waits for, and what cannot be shown; empty: nothing to say."""
    texts = [data.reason] if data.reason and data.status != "succeeded" else []
    text = "; ".join(map(plain, [*texts, *data.notes]))
    return Span(text, BAD if data.status in ("failed", "damaged", "deleted") else WARN)


# ---- tables

_TASK_COLUMNS = (
    Column("TASK"), Column("STATE"), Column("HOST", shrinks_to=8, rank=1), Column("GEN", is_number=True, rank=2),
    Column("STEP", is_number=True), Column("CPU", is_number=True, rank=3), Column("MEMORY", is_number=True, rank=3),
    Column("GPU", is_number=True, rank=1),
)  # fmt: skip
_GENERATION_COLUMNS = (
    Column("GEN", is_number=True), Column("STARTED", rank=2), Column("FROM", rank=3),
    Column("STEP", is_number=True, rank=1), Column("LASTED", is_number=True), Column("ENDED BY", shrinks_to=16),
)  # fmt: skip
_SNAPSHOT_COLUMNS = (
    Column("SNAPSHOT"), Column("COMMITTED", rank=1), Column("SIZE", is_number=True, rank=2),
    Column("TOOK", is_number=True, rank=3), Column("METRICS", shrinks_to=16),
)  # fmt: skip


def task_table(data: RunData, order: str = "name") -> Table:
    has_gpus = any(task.gpu is not None for task in data.tasks)
    columns = _TASK_COLUMNS if has_gpus else _TASK_COLUMNS[:-1]
    rows = [_task_row(task, has_gpus) for task in in_order(data.tasks, order)]
    return Table(columns, tuple(rows))


def in_order(tasks: Sequence[TaskData], order: str) -> list[TaskData]:
    """`order`: one of ORDERS. The tasks come in the order of their names."""
    if order == "state":
        return sorted(tasks, key=lambda task: _TROUBLE_FIRST.index(task.state) if task.state in _TROUBLE_FIRST else -1)
    if order == "step":  # those that are behind first
        return sorted(tasks, key=lambda task: -1 if task.step is None else task.step)
    if order in ("cpu", "memory"):
        return sorted(tasks, key=lambda task: -(getattr(task, order) or 0.0))
    return list(tasks)


def _task_row(task: TaskData, has_gpus: bool) -> Row:
    state = f"{task.state}: {plain(task.exit)}" if task.exit and task.state == "failed" else task.state
    cells = [
        Span(plain(task.name), NAME), Span(state, _TASK_STYLES.get(task.state, "")),
        Span(plain(task.host) or "-"), Span(str(task.generation or "-")),
        Span("-" if task.step is None else str(task.step)),
        Span("-" if task.cpu is None else f"{task.cpu:.2f}"), _memory_cell(task),
    ]  # fmt: skip
    if has_gpus:
        cells.append(_gpu_cell(task))
    return Row(task.name, tuple(cells))


def _memory_cell(task: TaskData) -> Span:
    if task.memory is None:
        return Span("-")
    share = task.memory / task.memory_limit if task.memory_limit else 0.0
    text = f"{size(task.memory)} {share:>3.0%}" if task.memory_limit else size(task.memory)
    return Span(text, BAD if share > 0.95 else WARN if share > 0.85 else "")


def _gpu_cell(task: TaskData) -> Span:
    if task.gpu is None:
        return Span("-")
    memory = f" {size(task.gpu_memory)}" if task.gpu_memory is not None else ""
    return Span(f"{task.gpu:.0%}{memory}", WARN if task.gpu < 0.1 and task.state == "running" else "")


def generation_table(data: RunData, now: float) -> Table:
    """Newest first."""
    rows = []
    for generation, end in reversed(list(zip(data.generations, _ends(data), strict=True))):
        until = end if end is not None else now
        lasted = span(round(max(0.0, until - generation.begin))) if generation.begin is not None else "-"
        step = "-" if generation.step is None else str(generation.step)
        started = "-" if generation.begin is None else moment(generation.begin, now)
        cells = (
            Span(str(generation.number)), Span(started), Span(generation.origin or "-"), Span(step), Span(lasted),
            _ended_by(generation, end, data),
        )  # fmt: skip
        rows.append(Row(str(generation.number), cells))
    return Table(_GENERATION_COLUMNS, tuple(rows))


def _ends(data: RunData) -> list[float | None]:
    """When each generation ended; None: it runs."""
    begins = [generation.begin for generation in data.generations]
    ends: list[float | None] = []
    for index, generation in enumerate(data.generations):
        following = next((begin for begin in begins[index + 1 :] if begin is not None), None)
        ended = generation.failed_at or generation.paused_at or following
        ends.append(ended or (None if data.is_alive else data.ended))
    return ends


def _ended_by(generation: Generation, end: float | None, data: RunData) -> Span:
    if generation.cause:
        source = f" of {generation.task}" if generation.task else ""
        detail = f": {generation.detail}" if generation.detail else ""
        return Span(f"{generation.cause}{source}{detail}", BAD)
    if generation.paused_at is not None:
        return Span("paused", STATUS_STYLES["paused"])
    is_newest = generation == data.generations[-1]
    if not is_newest:
        return Span("the next generation")
    return Span(data.status, STATUS_STYLES.get(data.status, "")) if not data.is_alive or end is None else Span("-")


def periods(data: RunData) -> list[Period]:
    pairs = zip(data.generations, _ends(data), strict=True)
    return [
        Period(generation.number, generation.begin, end, generation.failed_at is not None)
        for generation, end in pairs
        if generation.begin is not None
    ]


def snapshot_table(data: RunData, now: float) -> Table:
    rows = []
    for snapshot in data.snapshots:
        evaluation = metrics(dict(snapshot.evaluation), most=4)
        is_best = snapshot.name == data.best
        text = " ".join(filter(None, ["best:" if is_best and evaluation else "best" if is_best else "", evaluation]))
        cells = (
            Span(plain(snapshot.name), NAME),
            Span("-" if snapshot.committed is None else moment(snapshot.committed, now)),
            Span("-" if snapshot.size is None else size(snapshot.size)),
            Span("-" if snapshot.took_s is None else span(snapshot.took_s)),
            Span(text or "-", GOOD if is_best else ""),
        )
        rows.append(Row(snapshot.name, cells))
    return Table(_SNAPSHOT_COLUMNS, tuple(rows))


def moment(at: float, now: float) -> str:
    """A local time: 04:30:11 within a day, otherwise with its date."""
    time = datetime.fromtimestamp(at)
    return time.strftime("%H:%M:%S" if abs(now - at) < 20 * 3600 else "%b %d %H:%M")
