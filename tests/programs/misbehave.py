"""A fast program, standard library only, that misbehaves as its options say."""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import faults

ASLEEP = [sys.executable, "-c", "import time; time.sleep(10**6)"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sleep", type=float, default=0.05, help="seconds a step")
    parser.add_argument("--report", action="store_true", help="report steps to Paceline instead of printing them")
    parser.add_argument("--silent", action="store_true", help="neither report nor print steps")
    parser.add_argument("--resume", action="store_true", help="save each step as a snapshot, and go on from the last")
    parser.add_argument("--ignore-sigterm", action="store_true", help="and SIGINT")
    parser.add_argument("--slow-sigterm", type=float, metavar="S", help="on SIGTERM print `leaving`, leave S later")
    parser.add_argument(
        "--clean-up", action="store_true", help="print `interrupted` on SIGINT, `cleaned up` at the end"
    )
    parser.add_argument("--children", type=int, default=0, help="start processes that sleep")
    parser.add_argument("--strays", type=int, default=0, help="the same, each in a session of its own")
    parser.add_argument("--listen", metavar="VARIABLE", help="listen on the port in this variable, e.g. MASTER_PORT")
    parser.add_argument("--bars", type=int, default=0, metavar="N", help="a progress bar of N states that end in \\r")
    parser.add_argument("--long-line", type=int, default=0, metavar="BYTES", help="so many bytes without a newline")
    parser.add_argument("--bad-text", action="store_true", help="print what is not UTF-8, and control characters")
    parser.add_argument(
        "--lines", type=int, default=0, metavar="N", help="print N lines as fast as possible; -1: for ever"
    )
    parser.add_argument("--memory", type=int, metavar="MIB", help="take so much memory, then sleep")
    faults.add_options(parser)
    options = parser.parse_args()

    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.slow_sigterm is not None:
        signal.signal(signal.SIGTERM, lambda *_: leave(options.slow_sigterm))
    for stray in [False] * options.children + [True] * options.strays:
        print(f"child {subprocess.Popen(ASLEEP, start_new_session=stray).pid}", flush=True)
    if options.listen:
        listener = socket.create_server(("127.0.0.1", int(os.environ[options.listen])))
        print(f"listening on {listener.getsockname()[1]}", flush=True)
    say(options)
    if options.memory:
        faults.eat_memory(options.memory)

    if options.clean_up:
        try:
            train(options)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            raise
        finally:
            print("cleaned up", flush=True)
    else:
        train(options)


def train(options: argparse.Namespace) -> None:
    rank = int(os.environ.get("RANK") or os.environ.get("PACELINE_RANK") or 0)
    start = resumed() if options.resume else 0
    print(f"start {start}", flush=True)
    for step in range(start + 1, options.steps + 1):
        faults.before_step(step, rank, options)
        time.sleep(options.sleep)
        if options.report:
            import paceline

            paceline.report(step=step, loss=1 / step)
        elif not options.silent:
            print(f"step {step}", flush=True)
        if options.resume and rank == 0:
            save(step)
    print("done", flush=True)


def say(options: argparse.Namespace) -> None:
    out = sys.stdout.buffer
    for state in range(options.bars):
        out.write(f"\r{state + 1}/{options.bars} [{'=' * state}]".encode())
        out.flush()
        time.sleep(0.01)
    if options.bars:
        out.write(b"\n")
    if options.bad_text:
        out.write(b"not UTF-8: \xff\xfe\xc3\x28, a zero byte: \x00, a colour: \x1b[31mred\x1b[0m, caf\xc3\xa9\n")
    while options.long_line > 0:
        out.write(b"x" * min(options.long_line, 1 << 20))
        options.long_line -= 1 << 20
        if options.long_line <= 0:
            out.write(b"\n")
    printed = 0
    while printed != options.lines:
        out.write(b"line %d\n" % printed)
        printed += 1
    out.flush()


def leave(after: float) -> None:
    print("leaving", flush=True)
    time.sleep(after)
    sys.exit(0)


def save(step: int) -> None:
    partial = Path(os.environ["PACELINE_SNAPSHOT_DIR"]) / "x.partial"
    partial.mkdir(exist_ok=True)
    (partial / "step").write_text(str(step))
    shutil.rmtree(partial.with_name(f"step-{step}"), ignore_errors=True)
    partial.rename(partial.with_name(f"step-{step}"))


def resumed() -> int:
    restore = os.environ.get("PACELINE_RESTORE")
    return int((Path(restore) / "step").read_text()) if restore else 0


if __name__ == "__main__":
    main()
