"""Predictions per second of `paceline serve`, compared with a server that calls the model once per request."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import measure

sys.path.append(str(measure.ROOT / "tests"))

from support.lab.components import wrk

GOAL = 3.0
START = 120.0
PROGRAM = str(measure.PROGRAMS / "served_model.py")
_LUA = 'wrk.method = "POST"\nwrk.body = io.open(os.getenv("BODY")):read("*a")\n'


def main() -> None:
    parser = measure.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of load for each server and round")
    args = parser.parse_args()
    machine_info = measure.machine("tensorflow-cpu", "keras", "uvicorn")
    measure.say(
        f"Predictions per second with {args.clients} clients, one digit of 28 x 28 pixels per request, by wrk on the"
    )
    measure.say(
        "same machine. paceline: `python -m paceline.serve`; naive: the same HTTP libraries, one call of the model per"
    )
    measure.say("request; bare: calls of the model in a loop in one process, without HTTP and JSON. Interleaved.")
    measure.say(f"On: {machine_info}\n")
    env = measure.environment(1)
    ours: list[float] = []
    naive: list[float] = []
    with measure.workspace() as folder:
        subprocess.run([sys.executable, PROGRAM, "write", str(folder)], env=env, check=True, capture_output=True)
        (folder / "load.lua").write_text(_LUA)
        (folder / "body").write_text(json.dumps({"instances": [[[[0.5]] * 28] * 28]}))
        bare_command = [sys.executable, PROGRAM, "bare", str(folder), "--seconds", str(args.seconds)]
        bare = json.loads(
            subprocess.run(bare_command, env=env, check=True, capture_output=True).stdout.splitlines()[-1]
        )
        serve = [sys.executable, "-m", "paceline.serve", "--base", str(folder), "--name", "digits", "--port", "0"]
        serve += ["--leave-after", "0"]
        one_call = [sys.executable, PROGRAM, "naive", str(folder)]
        for number in range(args.rounds):
            sides = ((serve, ours), (one_call, naive))
            for command, rates in sides if number % 2 == 0 else sides[::-1]:
                with _server(command, env) as address:
                    _load(folder, address, args.clients, 2.0)
                    rates.append(_load(folder, address, args.clients, args.seconds))
            measure.progress(f"round {number + 1}: {ours[-1]:.0f} per second, naive {naive[-1]:.0f}")
    measure.table(
        ["side", "predictions per second"],
        [
            ["paceline", _summary(ours)],
            ["naive", _summary(naive)],
            ["bare, one at a time", f"{bare['1']:.0f}"],
            ["bare, 64 at a time", f"{bare['64']:.0f}"],
        ],
    )
    ratio = statistics.median(ours) / statistics.median(naive)
    ratio_to_bare = statistics.median(ours) / bare["1"]
    measure.say(
        f"{ratio:.1f} times the naive server (at least {GOAL:g}), {ratio_to_bare:.1f} times bare calls one at a time"
    )
    measure.finish(
        {
            "bench": "serve",
            "on": machine_info,
            "paceline": ours,
            "naive": naive,
            "bare": bare,
            "ratio": ratio,
            "goal": GOAL,
        }
    )


def _summary(rates: list[float]) -> str:
    return f"{statistics.median(rates):.0f} ({min(rates):.0f} .. {max(rates):.0f})"


@contextmanager
def _server(command: list[str], env: dict[str, str]) -> Iterator[str]:
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        if not address:
            raise measure.MeasurementFailed(f"{' '.join(command)} did not start")
        yield address
    finally:
        process.terminate()
        process.wait(60)


def _load(folder: Path, address: str, clients: int, seconds: float) -> float:
    program = wrk()
    libraries = str(program.parents[2] / "usr/lib/x86_64-linux-gnu")
    command = [
        str(program),
        "-t",
        "1",
        "-c",
        str(clients),
        "-d",
        f"{seconds:g}s",
        "-s",
        str(folder / "load.lua"),
        address,
    ]
    settings = {**os.environ, "BODY": str(folder / "body"), "LD_LIBRARY_PATH": libraries}
    output = subprocess.run(command, env=settings, check=True, capture_output=True, text=True).stdout
    if "Non-2xx" in output or "Socket errors" in output:
        raise SystemExit(f"requests failed:\n{output}")
    match = re.search(r"Requests/sec:\s+([\d.]+)", output)
    assert match, output
    return float(match[1])


if __name__ == "__main__":
    main()
