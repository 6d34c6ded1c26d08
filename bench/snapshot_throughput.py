"""Committing and restoring a snapshot, in a folder and in a bucket, against tools that do nothing else."""

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

# Memory that a virtual machine has given back to its host takes several times as long to write to as other memory, and
# which one a restore meets goes by turns.
RESTORES = 3
GOAL = 0.8  # of the best peer's MiB/s
LIMIT = 300.0
FOLDER, BUCKET = "folder", "bucket"
COMMIT, RESTORE = "commit", "restore"
PACELINE = "paceline"


@dataclass(frozen=True)
class State:
    name: str
    folder: Path
    size: int
    kept: bool  # whether its copies stay until the end

    @property
    def mib(self) -> float:
        return self.size / 2**20


@dataclass(frozen=True)
class Side:
    """One way to bring a state to a place, under a number, and back; `clear` is not timed."""

    commit: Callable[[State, int], None]
    restore: Callable[[State, int, Path], None]
    clear: Callable[[State, int], None]


Taken = dict[tuple[str, str, str, str], list[float]]  # place, what, state, side -> MiB/s


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", type=int, default=128, help="MiB of each of 8 files")
    parser.add_argument("--small", type=int, default=2000, help="files of 16 KiB")
    parser.add_argument("--places", nargs="+", choices=[FOLDER, BUCKET], default=[FOLDER, BUCKET])
    given = parser.parse_args()
    where = measure.machine("obstore")
    if BUCKET in given.places and (reason := carrying.no_bucket()):
        given.places.remove(BUCKET)
        measure.say(f"Without a bucket: {reason}.")
    measure.say(f"MiB/s for 8 files of {given.large} MiB and for {given.small} files of 16 KiB. Interleaved.")
    measure.say("paceline: a porter is asked to send and commit, or to fetch; both digest every byte (SHA-256).")
    measure.say("folder: `cp -r`, and one `sync -f` where it is a commit, as a commit is on the disk, too; then all")
    measure.say(f"  files of the copy are digested by {measure.cores()} processes, of sha256sum or of openssl. What is")
    measure.say("  restored is synced by neither side.")
    measure.say("bucket: s5cmd, which digests nothing.")
    measure.say("All files are in the page cache, and nothing is left to be written when a measurement begins.")
    measure.say(f"On: {where}\n")
    taken: Taken = {}
    with measure.workspace() as folder:
        states = _states(folder / "states", given.large, given.small)
        for place in given.places:
            with _sides(folder, place) as sides:
                _measure(folder, place, sides, states, given.rounds, taken)
    _report(where, given.places, [state.name for state in states], taken, given.rounds)


def _states(folder: Path, large: int, small: int) -> list[State]:
    def made(name: str, files: int, size: int, kept: bool) -> State:
        (folder / name).mkdir(parents=True)
        for number in range(files):
            (folder / name / f"part-{number:05}").write_bytes(os.urandom(size))
        return State(name, folder / name, files * size, kept)

    # Where thousands of files were deleted seconds ago, ext4 takes ten times as long for each new one.
    return [made("large", 8, large << 20, kept=False), made("small", small, 16 << 10, kept=True)]


def _measure(
    folder: Path, place: str, sides: Mapping[str, Side], states: list[State], rounds: int, taken: Taken
) -> None:
    numbers = itertools.count(1)
    for turn in range(rounds + 1):
        for state in states:
            for name in list(sides) if turn % 2 == 0 else list(reversed(sides)):
                side, number = sides[name], next(numbers)
                targets = [folder / f"restored-{place}-{number}-{again}" for again in range(RESTORES)]
                committed = state.mib / _timed(side.commit, state, number)
                restored = []
                for target in targets:
                    restored.append(state.mib / _timed(side.restore, state, number, target))
                    _same(state, target)
                    if not state.kept:
                        shutil.rmtree(target)
                if not state.kept:
                    side.clear(state, number)
                if turn:  # the first is for the caches and connections of all
                    taken.setdefault((place, COMMIT, state.name, name), []).append(committed)
                    taken.setdefault((place, RESTORE, state.name, name), []).extend(restored)
                    words = f"commit {committed:.0f}, restore {', '.join(f'{each:.0f}' for each in restored)} MiB/s"
                    measure.progress(f"{place}, round {turn}, {state.name} files, {name}: {words}")


def _timed(work: Callable[..., None], *given: Any) -> float:
    os.sync()  # what came before is not for this one to write
    before = time.perf_counter()
    work(*given)
    return time.perf_counter() - before


def _same(state: State, restored: Path) -> None:
    """Nobody may be fast by leaving something out."""
    sizes = [{path.name: path.stat().st_size for path in each.iterdir()} for each in (state.folder, restored)]
    if sizes[0] != sizes[1]:
        raise SystemExit(f"{restored} is not what was committed")


# ---- sides


@contextmanager
def _sides(folder: Path, place: str) -> Iterator[dict[str, Side]]:
    env = measure.environment(1)
    if place == FOLDER:
        with carrying.porter(str(folder / "snapshots"), env) as porter:
            digests = {"sha256sum": ["sha256sum"], "openssl": ["openssl", "dgst", "-sha256", "-r"]}
            yield {
                PACELINE: _paceline(porter),
                **{f"cp, {name}": _cp(folder, words) for name, words in digests.items() if shutil.which(name)},
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
    def digested(folder: Path) -> None:
        names = "\0".join(str(path) for path in sorted(folder.iterdir())).encode()
        each = ["-n", str(max(1, min(64, names.count(b"\0") // (2 * measure.cores()))))]
        _run(["xargs", "-0", "-P", str(measure.cores()), *each, *digest], input=names)

    def copied(number: int) -> Path:
        return folder / f"copied-{number}"

    def commit(state: State, number: int) -> None:
        _run(["cp", "-r", str(state.folder), str(copied(number))])
        _run(["sync", "-f", str(copied(number))])
        digested(copied(number))

    def restore(_: State, number: int, to: Path) -> None:
        _run(["cp", "-r", str(copied(number)), str(to)])
        digested(to)

    return Side(commit, restore, lambda _, number: shutil.rmtree(copied(number)))


def _s5cmd(url: str, env: Mapping[str, str]) -> Side:
    program = [str(carrying.s5cmd()), "--endpoint-url", env["AWS_ENDPOINT_URL"], "--log", "error"]

    def commit(state: State, number: int) -> None:
        _run([*program, "cp", f"{state.folder}/", f"{url}/{number}/"], env)

    def restore(_: State, number: int, to: Path) -> None:
        _run([*program, "cp", f"{url}/{number}/*", f"{to}/"], env)

    return Side(commit, restore, lambda _, number: _run([*program, "rm", f"{url}/{number}/*"], env))


def _run(command: list[str], env: Mapping[str, str] | None = None, input: bytes = b"") -> None:
    done = subprocess.run(command, env=env, input=input, capture_output=True, timeout=LIMIT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr.decode()[-2000:]}")


# ---- what is printed


def _report(where: dict[str, Any], places: list[str], states: list[str], taken: Taken, rounds: int) -> None:
    rows, results = [], []
    for place, what, state in [(p, w, s) for p in places for w in (COMMIT, RESTORE) for s in states]:
        found = {key[3]: values for key, values in taken.items() if key[:3] == (place, what, state)}
        middles = {side: measure.median(values) or 0.0 for side, values in found.items()}
        best = max((side for side in middles if side != PACELINE), key=lambda side: middles[side])
        share = measure.ratio(middles[PACELINE], middles[best])
        for side in sorted(found, key=lambda side: (side != PACELINE, side)):
            values = found[side]
            shown = str(share) if side == PACELINE else "best" if side == best else ""
            rows.append([f"{what}, {place}, {state} files", side, f"{middles[side]:.0f} MiB/s",
                         f"{min(values):.0f} .. {max(values):.0f}", shown])  # fmt: skip
        results.append(
            {
                "place": place, "what": what, "files": state, "paceline_mib_s": middles[PACELINE], "best": best,
                "best_mib_s": middles[best], "ratio": share, "goal": GOAL,
                "reached": share is not None and share >= GOAL,
                "all_mib_s": {side: [round(value, 1) for value in values] for side, values in found.items()},
            }
        )  # fmt: skip
    measure.table(["what", "side", "median", "range", "ratio"], rows)
    measure.say(f"at least {GOAL} of the best\n")
    measure.finish({"bench": "snapshot_throughput", "machine": where, "rounds": rounds, "results": results,
                    "reached": all(each["reached"] for each in results)})  # fmt: skip


if __name__ == "__main__":
    main()
