"""Committing and restoring a snapshot, in a folder and in a bucket, compared with tools that only copy files."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import carrying
import measure

# Memory that a virtual machine has returned to its host takes several times as long to write to, and whether a restore
# uses such memory varies.
RESTORES = 3
GOAL = 0.8  # as a share of the best peer's MiB/s
LIMIT = 300.0
FOLDER, BUCKET = "folder", "bucket"
COMMIT, RESTORE = "commit", "restore"
PACELINE = "paceline"


@dataclass(frozen=True)
class State:
    name: str
    folder: Path
    size: int
    kept: bool  # whether its copies are kept until the end

    @property
    def mib(self) -> float:
        return self.size / 2**20


@dataclass(frozen=True)
class Side:
    """One way to copy a state to a location, under a number, and back; `clear` is not timed."""

    commit: Callable[[State, int], None]
    restore: Callable[[State, int, Path], None]
    clear: Callable[[State, int], None]


Rates = dict[tuple[str, str, str, str], list[float]]  # location, operation, state, side -> MiB/s


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", type=int, default=128, help="MiB in each of 8 files")
    parser.add_argument("--small", type=int, default=2000, help="number of files of 16 KiB")
    parser.add_argument("--places", nargs="+", choices=[FOLDER, BUCKET], default=[FOLDER, BUCKET])
    args = parser.parse_args()
    machine_info = measure.machine("obstore")
    if BUCKET in args.places and (reason := carrying.no_bucket()):
        args.places.remove(BUCKET)
        measure.say(f"The bucket is skipped: {reason}.")
    measure.say(f"MiB/s for 8 files of {args.large} MiB and for {args.small} files of 16 KiB. Interleaved.")
    measure.say("paceline: a porter sends and commits, or fetches; both digest every byte (SHA-256).")
    measure.say(
        "folder: `cp -r`, and for a commit one `sync -f`, because Paceline's commits are on disk, too; then all"
    )
    measure.say(
        f"  files of the copy are digested by {measure.cores()} processes of sha256sum or openssl. Neither side"
    )
    measure.say("  syncs restored files.")
    measure.say("bucket: s5cmd, which computes no digests.")
    measure.say("All files are in the page cache, and no data is waiting to be written when a measurement begins.")
    measure.say(f"On: {machine_info}\n")
    rates: Rates = {}
    with measure.workspace() as folder:
        states = _states(folder / "states", args.large, args.small)
        for location in args.places:
            with _sides(folder, location) as sides:
                _measure(folder, location, sides, states, args.rounds, rates)
    _report(machine_info, args.places, [state.name for state in states], rates, args.rounds)


def _states(folder: Path, large: int, small: int) -> list[State]:
    def create(name: str, files: int, size: int, kept: bool) -> State:
        (folder / name).mkdir(parents=True)
        for number in range(files):
            (folder / name / f"part-{number:05}").write_bytes(os.urandom(size))
        return State(name, folder / name, files * size, kept)

    # If thousands of files were deleted seconds ago, ext4 takes ten times as long for each new file.
    return [create("large", 8, large << 20, kept=False), create("small", small, 16 << 10, kept=True)]


def _measure(
    folder: Path, location: str, sides: Mapping[str, Side], states: list[State], rounds: int, rates: Rates
) -> None:
    numbers = itertools.count(1)
    for round_number in range(rounds + 1):
        for state in states:
            for name in list(sides) if round_number % 2 == 0 else list(reversed(sides)):
                side, number = sides[name], next(numbers)
                targets = [folder / f"restored-{location}-{number}-{again}" for again in range(RESTORES)]
                committed = state.mib / _timed(side.commit, state, number)
                restored = []
                for target in targets:
                    restored.append(state.mib / _timed(side.restore, state, number, target))
                    _assert_same_files(state, target)
                    if not state.kept:
                        shutil.rmtree(target)
                if not state.kept:
                    side.clear(state, number)
                if round_number:  # the first round fills caches and opens connections
                    rates.setdefault((location, COMMIT, state.name, name), []).append(committed)
                    rates.setdefault((location, RESTORE, state.name, name), []).extend(restored)
                    summary = f"commit {committed:.0f}, restore {', '.join(f'{each:.0f}' for each in restored)} MiB/s"
                    measure.progress(f"{location}, round {round_number}, {state.name} files, {name}: {summary}")


def _timed(work: Callable[..., None], *arguments: Any) -> float:
    os.sync()  # earlier data must not be written during this measurement
    before = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - before


def _assert_same_files(state: State, restored: Path) -> None:
    """Check that all files were restored."""
    sizes = [{path.name: path.stat().st_size for path in each.iterdir()} for each in (state.folder, restored)]
    if sizes[0] != sizes[1]:
        raise SystemExit(f"{restored} differs from what was committed")


# ---- sides


@contextmanager
def _sides(folder: Path, location: str) -> Iterator[dict[str, Side]]:
    env = measure.environment(1)
    if location == FOLDER:
        with carrying.porter(str(folder / "snapshots"), env) as porter:
            digests = {"sha256sum": ["sha256sum"], "openssl": ["openssl", "dgst", "-sha256", "-r"]}
            yield {
                PACELINE: _paceline(porter),
                **{f"cp, {name}": _cp(folder, command) for name, command in digests.items() if shutil.which(name)},
            }
        return
    with carrying.bucket(folder / "s3") as (url, options), carrying.porter(f"{url}/ours", env | options) as porter:
        yield {
            PACELINE: _paceline(porter),
            "s5cmd": _s5cmd(f"{url}/theirs", env | options),
        }


def _paceline(porter: carrying.Porter) -> Side:
    return Side(
        lambda state, number: porter.commit(porter.send(state.folder, number), number),
        lambda _, number, to: porter.fetch(to, number),
        lambda _, number: porter.delete(number),
    )


def _cp(folder: Path, digest: list[str]) -> Side:
    def digest_files(folder: Path) -> None:
        names = "\0".join(str(path) for path in sorted(folder.iterdir())).encode()
        batch = ["-n", str(max(1, min(64, names.count(b"\0") // (2 * measure.cores()))))]
        _run(["xargs", "-0", "-P", str(measure.cores()), *batch, *digest], input=names)

    def copy_of(number: int) -> Path:
        return folder / f"copied-{number}"

    def commit(state: State, number: int) -> None:
        _run(["cp", "-r", str(state.folder), str(copy_of(number))])
        _run(["sync", "-f", str(copy_of(number))])
        digest_files(copy_of(number))

    def restore(_: State, number: int, to: Path) -> None:
        _run(["cp", "-r", str(copy_of(number)), str(to)])
        digest_files(to)

    return Side(commit, restore, lambda _, number: shutil.rmtree(copy_of(number)))


def _s5cmd(url: str, env: Mapping[str, str]) -> Side:
    program = [str(carrying.s5cmd()), "--endpoint-url", env["AWS_ENDPOINT_URL"], "--log", "error"]

    def commit(state: State, number: int) -> None:
        _run([*program, "cp", f"{state.folder}/", f"{url}/{number}/"], env)

    def restore(_: State, number: int, to: Path) -> None:
        _run([*program, "cp", f"{url}/{number}/*", f"{to}/"], env)

    return Side(commit, restore, lambda _, number: _run([*program, "rm", f"{url}/{number}/*"], env))


def _run(command: list[str], env: Mapping[str, str] | None = None, input: bytes = b"") -> None:
    result = subprocess.run(command, env=env, input=input, capture_output=True, timeout=LIMIT, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr.decode()[-2000:]}")


# ---- output


def _report(machine_info: dict[str, Any], locations: list[str], states: list[str], rates: Rates, rounds: int) -> None:
    rows, results = [], []
    for location, operation, state in [(p, w, s) for p in locations for w in (COMMIT, RESTORE) for s in states]:
        rates_by_side = {key[3]: values for key, values in rates.items() if key[:3] == (location, operation, state)}
        medians = {side: measure.median(values) or 0.0 for side, values in rates_by_side.items()}
        best = max((side for side in medians if side != PACELINE), key=lambda side: medians[side])
        ratio = measure.ratio(medians[PACELINE], medians[best])
        for side in sorted(rates_by_side, key=lambda side: (side != PACELINE, side)):
            values = rates_by_side[side]
            ratio_text = str(ratio) if side == PACELINE else "best" if side == best else ""
            rows.append([f"{operation}, {location}, {state} files", side, f"{medians[side]:.0f} MiB/s",
                         f"{min(values):.0f} .. {max(values):.0f}", ratio_text])  # fmt: skip
        results.append(
            {
                "place": location, "what": operation, "files": state, "paceline_mib_s": medians[PACELINE], "best": best,
                "best_mib_s": medians[best], "ratio": ratio, "goal": GOAL,
                "reached": ratio is not None and ratio >= GOAL,
                "all_mib_s": {side: [round(value, 1) for value in values] for side, values in rates_by_side.items()},
            }
        )  # fmt: skip
    measure.table(["operation", "side", "median", "range", "ratio"], rows)
    measure.say(f"at least {GOAL} of the best peer\n")
    measure.finish({"bench": "snapshot_throughput", "machine": machine_info, "rounds": rounds, "results": results,
                    "reached": all(each["reached"] for each in results)})  # fmt: skip


if __name__ == "__main__":
    main()
