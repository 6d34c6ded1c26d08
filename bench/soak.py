"""Whether anything grows: a simulated month of a run with 64 members, beside a real run that is always disturbed."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import soak_run

sys.path.insert(0, str(measure.SOURCE))

from paceline.agent import event_file, series_files
from paceline.agent.captain_process.event_log import UPLOADED
from paceline.agent.transfers import log_upload, stored_events

FULL_MINUTES = 20.0
MEMBERS = 64
DAYS = 30
BEAT_S = 240.0  # simulated seconds between two heartbeats of a member
EARLIER, LATER = (0.4, 0.6), (0.8, 1.0)  # the parts of the time that are compared
GROWTH = 0.05
# What may be added in any case: pages, open connections, and what a run has in progress.
SLACK = {
    "memory": 1024 * 1024, "blocks": 2000, "objects": 500, "descriptors": 2, "threads": 1, "processes": 2,
    "bytes": 64 * 1024, "files": 8, "CPU": 0.05,
}  # fmt: skip
SIMULATED = "captain and members"  # the process that simulates a month
# Files in the folder of a run, and memory, that grow up to a limit, in bytes.
LIMITS = {
    event_file.NAME: 2 * event_file.LIMIT,
    event_file.OLD: event_file.OLD_LIMIT + event_file.LIMIT,
    **{
        f"{series_files.FOLDER}/{tier}": (parts + 2) * series_files.PART
        for tier, parts in series_files._KEPT_PARTS.items()
    },
    f"{series_files.FOLDER}/N/N.jsonl": sum(parts + 2 for parts in series_files._KEPT_PARTS.values())
    * series_files.PART,
    "logs/worker-N.log": 4 * 2**30,  # limits.log of all tasks
    "held/worker-N/step-N-gN/part-N": 17 * 2**20,  # four snapshots of 4 MiB
    "held/worker-N/step-N-gN/state.pt": 42 * 2**20,  # of 10 MiB
    "held/worker-N/step-N-gN/ckpt.data-N-of-N": 42 * 2**20,
    **dict.fromkeys((UPLOADED, f"{UPLOADED}.parts"), 64 * 2**20),
    "store/logs": (stored_events.MOST + stored_events.CHECK_EVERY) * 2 * log_upload.LARGE,
    # Python keeps what it needed when it replaced events.jsonl or summed up a series, in arenas that are not full. The
    # blocks that are in use are compared.
    SIMULATED: 64 * 2**20,
}
MONTHS = {"month": 0.0, "month, captain restarts daily": 1.0}  # days of each captain; 0: only one
LATE = 1.0  # of the time: how much longer the simulation may take on a busy machine
LARGE = 64 * 1024  # bytes; smaller files are not shown unless they grow


@dataclass(frozen=True)
class Result:
    kind: str
    name: str
    earlier: float
    later: float
    limit: float | None = None

    @property
    def grows(self) -> bool:
        if self.limit is not None:
            return self.later > self.limit
        return self.later - self.earlier > max(GROWTH * self.earlier, SLACK[self.kind])

    def row(self) -> list[str]:
        change = f"{(self.later / self.earlier - 1):+.1%}" if self.earlier else "-"
        limit = "no limit" if self.limit == float("inf") else f"at most {_shown(self.kind, self.limit or 0.0)}"
        verdict = "GROWS" if self.grows else "flat" if self.limit is None else limit
        return [
            self.kind, self.name, *(_shown(self.kind, value) for value in (self.earlier, self.later)), change, verdict
        ]  # fmt: skip


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--minutes", type=float, default=FULL_MINUTES)
    parser.add_argument(
        "--real-frameworks", action="store_true",
        help="only real runs: TensorFlow and torch beside each other, a task of each killed every 30 s",
    )  # fmt: skip
    parser.add_argument("--only", choices=["month", "run"], help="only the simulated month, or only the real run")
    parser.add_argument("--no-bucket", action="store_true", help="the store is a folder, which does not fail")
    args = parser.parse_args()
    packages = ("tensorflow-cpu", "torch") if args.real_frameworks else ()
    machine_info = measure.machine(*packages)
    seconds, members = 60 * args.minutes, max(8, min(MEMBERS, round(MEMBERS * args.minutes / FULL_MINUTES)))
    jobs = soak_run.FRAMEWORKS if args.real_frameworks else (soak_run.PLAIN,)
    simulates, runs = not args.real_frameworks and args.only != "run", args.only != "month"
    if simulates:
        measure.say(f"Simulated: {DAYS} days of a run with {members} members, twice: with one captain, and with one")
        measure.say(f"captain per day. A heartbeat every {BEAT_S:g} s (real members: every second). In 2 hours, 3")
        measure.say("tasks fail, 2 connections break, a host is replaced, and the store is away for 10 min.")
    if runs:
        for job in jobs:
            captain = f", the captain every {job.captain_lives:g} s" if job.captain_lives != soak_run.NEVER else ""
            measure.say(f"Real: {job.workers} tasks ({job.framework}), one killed every {job.kill_every:g} s{captain};")
            measure.say(f"uploads limited to {soak_run.RATE}/s; three clients follow it.")
        if not args.no_bucket:
            measure.say(f"A bucket that fails for 8 of {soak_run.STORE_CYCLE:g} s.")
    measure.say(f"{args.minutes:g} minutes. Compared: {EARLIER[0]:.0%} to {EARLIER[1]:.0%} of the time, and the last")
    measure.say(f"fifth (means without the upper and lower quarter). Growth of {GROWTH:.0%} is allowed, and always:")
    measure.say(", ".join(f"{_shown(kind, amount)} ({kind})" for kind, amount in SLACK.items()) + ".")
    measure.say(f"On: {machine_info}\n")
    samples = soak_run.Samples()
    limit = time.monotonic() + (1 + LATE) * seconds
    with measure.workspace() as folder:
        months = [Month(folder, name, days, members, seconds) for name, days in MONTHS.items()] if simulates else []
        if runs:
            real = folder / "real"
            real.mkdir()
            soak_run.soak(real, jobs, not args.no_bucket, seconds, samples, measure.progress)
        problems = [month.finish(max(0.0, limit - time.monotonic())) for month in months]
        problems += [samples.problem, *(f"after the end: {each}" for each in samples.left)]
        for month in months:
            for (kind, name), values in month.samples.values.items():
                samples.values[kind, f"{month.name}: {name}"] = values
    results = [result for kind, name in samples.values if (result := _result(kind, name, samples)) is not None]
    _report(machine_info, args.minutes, results, months, samples, list(filter(None, problems)))


def _report(
    machine_info: dict[str, Any], minutes: float, results: list[Result], months: list[Month],
    samples: soak_run.Samples, problems: list[str],
) -> None:  # fmt: skip
    shown = [each for each in results if each.grows or _is_shown(each)]
    measure.table(["kind", "what", "earlier", "later", "change", "verdict"], [each.row() for each in shown])
    for month in months:
        measure.say(f"{month.name}: {month.summary}")
    measure.say(f"real: {samples.kills} tasks and {samples.captain_kills} captains killed, {samples.refused} requests")
    growing = [f"{each.kind} of {each.name}" for each in results if each.grows]
    measure.say(f"to the store failed. {len(results)} values were compared.")
    for run, size in samples.sizes.items():
        measure.say(f"After the end, the folder of {run} has {_shown('bytes', size)}.")
    for problem in problems:
        measure.say(f"Failed: {problem}")
    measure.say(f"Growing: {'; '.join(growing) or 'nothing'}\n")
    measure.finish(
        {
            "bench": "soak", "machine": machine_info, "minutes": minutes, "kills": samples.kills,
            "captain_kills": samples.captain_kills, "refused": samples.refused, "sizes": samples.sizes,
            "months": {month.name: month.last for month in months}, "compared": len(results), "growing": growing,
            "problems": problems, "reached": not growing and not problems,
            "values": {f"{each.kind}: {each.name}": [each.earlier, each.later] for each in shown},
        }
    )  # fmt: skip
    if growing or problems:
        raise SystemExit(1)


def _is_shown(result: Result) -> bool:
    if result.kind in ("bytes", "files"):
        return result.kind == "bytes" and (result.limit is not None or result.later >= LARGE)
    return True


# ---- comparison


def _result(kind: str, name: str, samples: soak_run.Samples) -> Result | None:
    """None: it existed in only one of the parts of the time. A file that did not exist had 0 bytes."""
    known = dict(samples.values[kind, name])
    part = name.partition(":")[0]
    same = [each for (_, other), each in samples.values.items() if other.partition(":")[0] == part]
    times = {at for each in same for at, _ in each}
    if kind in ("bytes", "files"):
        known = dict.fromkeys(times, 0.0) | known
    whole = max(times)
    earlier, later = (
        [value for at, value in known.items() if begin * whole <= at <= end * whole] for begin, end in (EARLIER, LATER)
    )
    limit = LIMITS.get(name.partition(": ")[2]) if kind in ("bytes", "files", "memory") else None
    limit = float("inf") if kind == "files" and limit is not None else limit  # the size is what counts
    return Result(kind, name, middle_mean(earlier), middle_mean(later), limit) if earlier and later else None


def middle_mean(values: Sequence[float]) -> float:
    """The mean without the upper and the lower quarter: short peaks do not count."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return statistics.fmean(ordered[quarter : len(ordered) - quarter])


def _shown(kind: str, value: float) -> str:
    if kind in ("memory", "bytes"):
        return f"{value / 2**20:.2f} MiB" if value >= 2**18 else f"{value / 1024:.1f} KiB"
    return f"{value:.2f} s" if kind == "CPU" else f"{value:,.1f}".removesuffix(".0")


# ---- the simulated month


class Month:
    """A process that simulates a month, and the time of `status` and `ls` on the folder of its run."""

    def __init__(self, parent: Path, name: str, captain_days: float, members: int, seconds: float) -> None:
        self.name, self.samples, self.last = name, soak_run.Samples(), dict[str, Any]()
        self._parent = parent / name.replace(" ", "-").replace(",", "")
        self._folder = self._parent / "home" / "runs" / "month-3f9a"
        self._folder.mkdir(parents=True)
        started = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(time.time() - DAYS * 86400))
        info = {"run": "month-3f9a", "job": "job", "framework": "tensorflow", "strategy": "", "started": started}
        (self._folder / "run.json").write_text(json.dumps(info))
        arguments = ["--folder", self._folder, "--members", members, "--days", DAYS, "--beat", BEAT_S]
        arguments += ["--seconds", 0.95 * seconds, "--restart-every", captain_days]
        self._errors = self._parent / "output"
        self._process = subprocess.Popen(
            [sys.executable, str(measure.PROGRAMS / "month.py"), *map(str, arguments)], env=measure.environment(1),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors.open("wb"),
        )  # fmt: skip
        self._problem: Exception | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            self._read_samples()
        except Exception as error:
            self._problem = error
            self._process.kill()

    def _read_samples(self) -> None:
        assert self._process.stdout is not None
        day = -1
        for line in self._process.stdout:
            self.last = sample = json.loads(line)
            for kind in ("memory", "blocks", "objects", "descriptors", "threads"):
                self.samples.add(kind, SIMULATED, sample["day"], sample[kind])
            for name, (size, count) in sample["files"].items():
                self.samples.add("bytes", name, sample["day"], size)
                self.samples.add("files", name, sample["day"], count)
            if int(sample["day"]) > day:
                day = int(sample["day"])
                for verb in ("status", "ls"):
                    self.samples.add("CPU", f"paceline {verb}", sample["day"], self._cpu_seconds(verb))

    def _cpu_seconds(self, verb: str) -> float:
        """CPU time and not wall time: other processes use the same cores."""
        env = measure.environment(1, {"PACELINE_HOME": str(self._parent / "home")})
        with open(os.devnull, "wb") as null:
            process = subprocess.Popen([*measure.PACELINE, verb], env=env, stdout=null, stderr=null)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise measure.MeasurementFailed(f"paceline {verb} failed")
        return usage.ru_utime + usage.ru_stime

    def finish(self, limit: float) -> str:
        """Wait for its end: if cores were busy, it takes longer than the real run. Returns what is wrong."""
        self._reader.join(limit)
        if self._problem is not None:
            return f"{self.name}: {self._problem}"
        if self._reader.is_alive():
            return f"{self.name}: only {self.last.get('day', 0.0):.1f} of {DAYS} days: the cores were busy"
        return f"{self.name}: {self._errors.read_text()[-2000:]}" if self._process.wait(60) else ""

    @property
    def summary(self) -> str:
        last = self.last
        if not last:
            return "nothing was measured"
        done = f"{last['day']:g} days, {last['messages']:,} messages"
        return f"{done}, {last['generation']:,} generations, {last['captains']} captains"


if __name__ == "__main__":
    main()
