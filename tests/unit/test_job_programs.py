"""What `paceline try` and `paceline export` run."""

from __future__ import annotations

from pathlib import Path

from paceline.client.models.job_programs import Program


def test_references_are_expanded_once_the_snapshot_is_known_and_only_in_the_job_file() -> None:
    referring = {"FROM": "$PACELINE_RESTORE/weights", "NODE": "$PACELINE_RANK"}
    program = Program(("/bin/python", "try.py", "--run=$PACELINE_RUN"), {"PACELINE_RUN": "r"}, Path(), "a", referring)
    extended = program.extended(["$PACELINE_RUN"], PACELINE_RESTORE="/restored")
    assert extended.argv == ("/bin/python", "try.py", "--run=r", "$PACELINE_RUN")
    assert extended.env == {"PACELINE_RUN": "r", "PACELINE_RESTORE": "/restored", "FROM": "/restored/weights"}
