"""Time from start to first step, two workers: `paceline run`, compared with the same processes started by a script."""

from __future__ import annotations

import sys
from pathlib import Path

import measure

WORKERS = 2
LIMIT = 90.0
GOAL = 0.3  # seconds more than the script
FRAMEWORKS = ("tensorflow", "torch")


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--framework", choices=[*FRAMEWORKS, "both"], default="both")
    args = parser.parse_args()
    chosen = FRAMEWORKS if args.framework == "both" else (args.framework,)
    machine_info = measure.machine("tensorflow-cpu", "torch")
    measure.say(
        f"Start to first step of {WORKERS} workers, from just before the launcher is started until every worker"
    )
    measure.say("has done a step. paceline: `paceline run job.yaml`; script: bench/programs/launch.py. Interleaved.")
    measure.say(f"On: {machine_info}\n")
    times: dict[tuple[str, str], list[float]] = {(name, side): [] for name in chosen for side in ("paceline", "script")}
    with measure.workspace() as folder:
        for name in chosen:
            _once(folder, name, "script")  # fills the page cache; not counted
        for number in range(args.rounds):
            for name in chosen:
                order = ("paceline", "script") if number % 2 == 0 else ("script", "paceline")
                for side in order:
                    times[name, side].append(_once(folder, name, side))
                    measure.progress(f"round {number + 1} {name} {side}: {times[name, side][-1]:.3f} s")
    rows, results = [], {}
    for name in chosen:
        ours, theirs = times[name, "paceline"], times[name, "script"]
        paired_difference = measure.median([one - other for one, other in zip(ours, theirs, strict=True)])
        ours_median, theirs_median = measure.median(ours), measure.median(theirs)
        assert paired_difference is not None and ours_median is not None and theirs_median is not None
        results[name] = {
            "paceline_s": ours_median, "script_s": theirs_median, "more_s": round(ours_median - theirs_median, 4),
            "more_paired_s": paired_difference, "ratio": measure.ratio(ours_median, theirs_median), "goal_more_s": GOAL,
            "reached": ours_median - theirs_median <= GOAL, "paceline_all_s": ours, "script_all_s": theirs,
        }  # fmt: skip
        rows.append(
            [name, measure.seconds(ours_median), measure.spread(ours), measure.seconds(theirs_median),
             measure.spread(theirs), f"{ours_median - theirs_median:+.3f} s", f"{paired_difference:+.3f} s"]
        )  # fmt: skip
    headings = ["framework", "paceline", "(range)", "script", "(range)", "difference", "median difference of pairs"]
    measure.table(headings, rows)
    measure.finish({"bench": "start", "machine": machine_info, "rounds": args.rounds, "results": results})


def _once(parent: Path, framework: str, side: str) -> float:
    with measure.fresh(parent) as folder:
        stamps = folder / "stamps"
        env = measure.environment(WORKERS, {"BENCH_STAMPS": str(stamps), "PACELINE_HOME": str(folder / "home")})
        program = f"{framework}_steps.py"
        if side == "paceline":
            job = measure.write_job(folder, framework, ["python", program], WORKERS)
            command = [*measure.PACELINE, "run", str(job)]
        else:
            task = [sys.executable, str(measure.PROGRAMS / program)]
            command = [sys.executable, str(measure.PROGRAMS / "launch.py"), framework, str(WORKERS), *task]
        before = measure.now()
        process = measure.spawn(command, folder, env)

        def time_of_last() -> float | None:
            first = measure.first_steps(measure.stamps(stamps))
            return max(stamp.at for stamp in first.values()) if len(first) == WORKERS else None

        after: float = measure.wait_until(time_of_last, LIMIT, f"the first step of {framework} under {side}")
        measure.wait_until(lambda: process.poll() is not None, LIMIT, f"the end of {framework} under {side}")
        return after - before


if __name__ == "__main__":
    main()
