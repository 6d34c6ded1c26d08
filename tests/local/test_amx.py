"""AMX instructions that the CPU reports and that cannot be used: the probe, real frameworks, runs, and `doctor`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.frameworks import amx_probe
from support.environment import without
from support.person import Person

ILLEGAL, RETURN = bytes.fromhex("0f0b"), bytes.fromhex("c3")  # ud2, ret
SIZES, NO_SIZES = bytes.fromhex("b840000800c3"), bytes.fromhex("31c0c3")  # return 0x80040, return 0
BFLOAT16 = {
    "torch": "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print(float((a @ a)[0, 0]))",
    "tensorflow": (
        "import tensorflow as tf; a = tf.ones((64, 64), tf.bfloat16); print(float(tf.linalg.matmul(a, a)[0, 0]))"
    ),
}
PROGRAM = "import os; print('limit', os.environ.get('ONEDNN_MAX_CPU_ISA'))"
FINDING = "this CPU reports AMX instructions that cannot be used"


@pytest.fixture
def me(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Person:
    for name in (amx_probe.VARIABLE, amx_probe.OLD_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return Person(tmp_path)


def test_the_probe_survives_what_its_child_does_not() -> None:
    assert amx_probe.probe(ILLEGAL, SIZES) == amx_probe.TRAPS
    assert amx_probe.probe(RETURN, SIZES) == amx_probe.WORKS


def test_instructions_without_the_sizes_of_their_registers_cannot_be_used() -> None:
    """As under some hypervisors, which allow the instructions: oneDNN then configures registers of size 0."""
    assert amx_probe.probe(RETURN, NO_SIZES) == amx_probe.TRAPS


@pytest.mark.parametrize("framework", BFLOAT16)
def test_bfloat16_works_with_the_limit_and_fails_without_it_only_if_the_probe_says_so(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(amx_probe.OVERRIDE, raising=False)
    env = {**without("PACELINE", "ONEDNN", "DNNL", "TF_"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    limits = amx_probe.environment({})
    for variables, dies in ({**env, **limits}, False), (env, bool(limits)):
        result = subprocess.run(
            [sys.executable, "-c", BFLOAT16[framework]], env=variables, capture_output=True, timeout=120
        )
        assert result.returncode == (-signal.SIGILL if dies else 0), result.stderr.decode()
        if variables == env:
            break  # no limits: the second case is the same


def test_tasks_get_the_limit_and_a_note_is_printed(me: Person) -> None:
    me.job(PROGRAM, workers=2)
    result = me.call("run", PACELINE_AMX="traps")
    assert result.returncode == 0, result.stderr
    assert "worker-0 | limit AVX512_CORE_FP16" in result.stderr and "worker-1 | limit AVX512_CORE_FP16" in result.stderr
    (note,) = [line for line in result.stderr.splitlines() if FINDING in line]
    assert note.endswith("; tasks run with ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16")


def test_a_limit_of_the_job_is_kept_and_none_is_set_if_amx_works(me: Person) -> None:
    me.job(PROGRAM, more="env: {ONEDNN_MAX_CPU_ISA: AVX2}\n")
    result = me.call("run", PACELINE_AMX="traps")
    assert "limit AVX2" in result.stderr and FINDING not in result.stderr
    me.job(PROGRAM)
    assert "limit None" in me.call("run", PACELINE_AMX="works").stderr


def test_a_death_by_sigill_names_the_likely_reason(me: Person) -> None:
    me.job("import os, signal; os.kill(os.getpid(), signal.SIGILL)", more="restart: {limit: 0}\n")
    for probe_result, reason in (("works", "may be built for another CPU"), ("traps", FINDING)):
        result = me.call("run", "-o", "json", PACELINE_AMX=probe_result)
        report = json.loads(result.stdout)
        assert (result.returncode, report["cause"]) == (1, "signal")
        assert report["reason"].startswith("worker-0: killed by SIGILL: ") and reason in report["reason"]


def test_doctor_reports_amx(me: Person) -> None:
    output = me.call("doctor", PACELINE_AMX="traps").stdout
    assert f"warn  amx          {FINDING}" in output
    assert "-> tasks get ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in output
    assert "ok    amx          works" in me.call("doctor", PACELINE_AMX="works").stdout
    assert " amx " not in me.call("doctor", PACELINE_AMX="absent").stdout
