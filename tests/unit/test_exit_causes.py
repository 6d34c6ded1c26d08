"""Why a task ended, from its exit status and the end of its log."""

from __future__ import annotations

import signal

import pytest

from paceline.agent.tasks import exit_causes, tracebacks

ERROR = """Traceback (most recent call last):
  File "/code/train.py", line 12, in <module>
    main()
  File "/code/train.py", line 8, in main
    raise ValueError("no such column")
ValueError: no such column""".splitlines()

CHAINED = """Traceback (most recent call last):
  File "/code/a.py", line 1, in <module>
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/code/b.py", line 2, in <module>
    raise my.package.OddError("worse")
my.package.OddError: worse
and a second line""".splitlines()

SURVIVOR = """Traceback (most recent call last):
  File "/code/train.py", line 5, in <module>
tensorflow.python.framework.errors_impl.UnavailableError: Collective ops is aborted by: recvmsg:Connection reset by peer""".splitlines()  # noqa: E501

PORT = """Traceback (most recent call last):
  File "/code/train.py", line 5, in <module>
OSError: [Errno 98] Address already in use""".splitlines()


def exited(code: int) -> int:
    return code << 8


def test_success_has_no_cause() -> None:
    assert exit_causes.classify(exited(0), ERROR).kind == ""


def test_an_exception_is_named_with_its_location() -> None:
    cause = exit_causes.classify(exited(1), ERROR)
    assert cause.kind == "program-error" and not cause.survivor
    assert cause.detail == "ValueError: no such column at /code/train.py:8"
    assert cause.place == "ValueError /code/train.py:8"


@pytest.mark.parametrize("error", ["Exception", "KeyboardInterrupt", "my.package.Odd", "a.b.ClosedQ_1"])
def test_every_exception_is_recognized_by_the_name_of_its_class(error: str) -> None:
    for line in (error, f"{error}: no such column"):
        cause = exit_causes.classify(exited(1), [*ERROR[:-1], line])
        assert cause.place == f"{error} /code/train.py:8"


@pytest.mark.parametrize("line", ["worker", "a.b: c", "Epoch 1", "Loss: 0.5", "A.b"])
def test_other_output_after_a_traceback_is_not_its_exception(line: str) -> None:
    assert exit_causes.classify(exited(1), [*ERROR[:-1], line]).raised is None


def test_the_last_of_chained_exceptions_counts() -> None:
    assert exit_causes.classify(exited(1), CHAINED).place == "my.package.OddError /code/b.py:2"


def test_an_exit_code_without_a_traceback_shows_the_last_line() -> None:
    cause = exit_causes.classify(exited(3), ["bad learning rate", ""])
    assert cause.kind == "program-error" and cause.detail == "exit code 3; last line of output: bad learning rate"


def test_errors_without_a_traceback_are_the_same_only_with_the_same_last_line() -> None:
    first, second, again = (
        exit_causes.classify(exited(1), [line]).place for line in ("epoch 15", "epoch 30", "epoch 15")
    )
    assert first == again != second


def torchrun_log(output: str, code: int) -> list[str]:
    """The end of the log of a torchrun whose process 24875 printed this and ended with this code."""
    return f"""{output}
E1117 15:58:15.373000 24821 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code})
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 10, in <module>
    sys.exit(main())
  File "/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 386, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
train.py FAILED
Failures:
  [1]:
  exitcode  : 7 (pid: 24876)
Root Cause (first observed failure):
  [0]:
  rank      : 1 (local_rank: 0)
  exitcode  : {code} (pid: 24875)
  traceback : To enable traceback see: elsewhere
============================================================""".splitlines()


RANKS = """[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "/code/train.py", line 6, in main
[rank0]:   File "/code/train.py", line 9, in main
[rank0]: RuntimeError: gloo: Connection closed by peer [127.0.0.1]
[rank1]: KeyError: 'x'
[rank1]: During handling of the above exception, another exception occurred:
[rank1]: Traceback (most recent call last):
[rank1]:   File "/code/train.py", line 7, in main
[rank1]: ValueError: bad batch"""


@pytest.mark.parametrize(
    ("output", "code", "kind", "detail"),
    [
        (RANKS, 1, "program-error", "ValueError: bad batch at /code/train.py:7"),
        ("epoch 3", -9, "signal", "killed by SIGKILL"),
        ("epoch 3", -15, "preempted", "terminated by an external SIGTERM"),
        ("epoch 3", 3, "program-error", "exit code 3; last line of output: epoch 3"),
    ],
)
@pytest.mark.parametrize("is_reported", [False, True])
def test_the_cause_below_torchrun_is_that_of_the_program(
    output: str, code: int, kind: str, detail: str, is_reported: bool
) -> None:
    """Otherwise, any two failures would be the same error of torchrun at the same line."""
    log = torchrun_log(output, code)
    raised = tracebacks.traceback(log) if is_reported else None
    cause = exit_causes.classify(exited(1), log, raised=raised)
    assert (cause.kind, cause.detail, cause.survivor) == (kind, detail, False)
    assert exit_causes.signal_below(log, raised) == max(0, -code)
    assert exit_causes.classify(exited(1), log, out_of_memory="no memory").kind == (
        "out-of-memory" if code == -9 else kind
    )
    own = exit_causes.own_error(log, raised)
    assert own is not None and own.detail == detail


def test_the_loss_of_a_peer_is_recognized_below_torchrun() -> None:
    assert exit_causes.classify(exited(1), torchrun_log("\n".join(SURVIVOR), 1)).survivor


@pytest.mark.parametrize(
    ("text", "kind", "detail"),
    [
        ("returned non-zero exit status 2.", "program-error", "exit code 2; last line of output: usage: train.py"),
        ("died with <Signals.SIGSEGV: 11>.", "signal", "killed by SIGSEGV"),
    ],
)
def test_the_cause_below_accelerate_launch(text: str, kind: str, detail: str) -> None:
    library = "accelerate/commands/launch.py:999"
    raised = tracebacks.Raised("subprocess.CalledProcessError", f"Command ['x'] {text}", "/bin/accelerate:10", library)
    cause = exit_causes.classify(exited(1), ["usage: train.py", "Traceback (most recent call last):"], raised=raised)
    assert (cause.kind, cause.detail) == (kind, detail)
    own = tracebacks.Raised(
        "subprocess.CalledProcessError", f"Command ['x'] {text}", "/code/train.py:3", "subprocess.py:5"
    )
    assert exit_causes.classify(exited(1), [], raised=own).detail == str(own), "of the program itself"


LIBRARY = """Traceback (most recent call last):
  File "/code/train.py", line 12, in <module>
    main()
  File "/code/model.py", line 30, in forward
    return self.layer(x)
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125, in forward
    return F.linear(input, self.weight, self.bias)
RuntimeError: mat1 and mat2 shapes cannot be multiplied""".splitlines()


def test_an_exception_of_a_library_is_located_in_the_users_code() -> None:
    cause = exit_causes.classify(exited(1), LIBRARY)
    assert cause.detail == (
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied at /code/model.py:30 "
        "(raised in torch/nn/modules/linear.py:125)"
    )


@pytest.mark.parametrize(
    ("inner", "library"),
    [
        ("/usr/lib/python3.12/json/decoder.py", "json/decoder.py:2"),
        ("/usr/lib/python3/dist-packages/numpy/x.py", "numpy/x.py:2"),
        ("<__array_function__ internals>", "<__array_function__ internals>:2"),
        ("/tmp/__autograph_generated_filex.py", "/tmp/__autograph_generated_filex.py:2"),
        ("/src/paceline/torch/__init__.py", "paceline/torch/__init__.py:2"),
    ],
)
def test_frames_of_libraries(inner: str, library: str) -> None:
    assert tracebacks.places([("/code/a.py", "1"), (inner, "2")]) == ("/code/a.py:1", library)
    assert tracebacks.places([(inner, "2")]) == (f"{inner}:2", ""), "there is no other frame"


def test_frames_of_the_import_system_are_ignored() -> None:
    frozen = ("<frozen importlib._bootstrap>", "2")
    assert tracebacks.places([("/code/a.py", "1"), frozen]) == ("/code/a.py:1", "")
    assert tracebacks.places([("/code/a.py", "1"), frozen, ("/code/b.py", "3")]) == ("/code/b.py:3", "")


def test_the_code_of_a_command_line_is_the_users() -> None:
    assert tracebacks.places([("<string>", "1")]) == ("<string>:1", "")


def test_missing_output_is_reported() -> None:
    assert exit_causes.classify(exited(3), []).detail == "exit code 3 without any output"


def test_the_loss_of_a_peer_is_recognized() -> None:
    assert exit_causes.classify(exited(1), SURVIVOR).survivor


def test_a_port_in_use() -> None:
    assert exit_causes.classify(exited(1), PORT).kind == "port-in-use"
    raised = tracebacks.Raised(
        "tensorflow.python.framework.errors_impl.UnknownError", "Could not start gRPC server", "train.py:3"
    )
    assert exit_causes.classify(exited(1), [], raised=raised).kind == "port-in-use"


@pytest.mark.parametrize(
    ("status", "kind", "detail"),
    [
        (signal.SIGKILL, "signal", "killed by SIGKILL"),
        (signal.SIGSEGV, "signal", "killed by SIGSEGV"),
        (exited(137), "signal", "killed by SIGKILL"),
        (signal.SIGTERM, "preempted", "terminated by an external SIGTERM"),
    ],
)
def test_signals(status: int, kind: str, detail: str) -> None:
    cause = exit_causes.classify(int(status), [])
    assert (cause.kind, cause.detail) == (kind, detail)


def test_a_kill_with_evidence_is_out_of_memory() -> None:
    assert exit_causes.classify(signal.SIGKILL, [], out_of_memory="killed by the kernel").kind == "out-of-memory"


def test_torch_prefixes_are_ignored() -> None:
    assert (
        exit_causes.classify(exited(1), [f"[rank1]: {line}" for line in ERROR]).place == "ValueError /code/train.py:8"
    )


def test_an_old_line_does_not_make_a_survivor() -> None:
    assert not exit_causes.classify(exited(1), ["retrying after: Connection reset by peer", *ERROR]).survivor


def test_an_error_that_the_task_reported_is_the_cause_even_if_it_had_to_be_killed() -> None:
    error = tracebacks.Raised("ValueError", "bad", "/code/train.py:3")
    cause = exit_causes.classify(signal.SIGKILL, [], raised=error)
    assert (cause.kind, cause.detail) == ("program-error", "ValueError: bad at /code/train.py:3")
    own = exit_causes.own_error([], error)
    assert own is not None and own.place == "ValueError /code/train.py:3"


def test_a_killed_task_is_not_a_survivor_whatever_it_printed() -> None:
    assert not exit_causes.classify(signal.SIGKILL, SURVIVOR).survivor


def test_a_task_of_a_host_that_was_asked_to_leave_is_preempted() -> None:
    assert exit_causes.classify(exited(1), ERROR, asked_to_leave=True).kind == "preempted"


def test_a_task_that_was_ended_shows_its_own_error_only_at_the_end_of_its_log() -> None:
    own = exit_causes.own_error(ERROR)
    assert own is not None and own.kind == "program-error"
    assert exit_causes.own_error([*ERROR, "a", "b", "c", "d"]) is None


def test_stacks_start_with_the_fault() -> None:
    lines = [
        "step 3",
        "Fatal Python error: Aborted",
        "",
        "Current thread 0x1 (most recent call first):",
        '  File "x.py"',
    ]
    assert exit_causes.stacks(lines).startswith("Fatal Python error: Aborted\n")
    assert exit_causes.stacks(["step 3"]) == ""
