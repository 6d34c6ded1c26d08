"""The `try` and `export` sections of a job file: commands that use a snapshot of the model."""

from __future__ import annotations

from pydantic import Field

from paceline.job.fields import Command, Strict

NAMES = ("try", "export")


class Try(Strict):
    """The command that `paceline try RUN -- ARGS` runs on your machine, with a snapshot of the run in
    `PACELINE_RESTORE`."""

    command: Command = Field(
        description="The command; ARGS are appended to it. It runs in the `code` folder with the job's `env`, as a "
        "single process.",
        examples=[["python", "translate.py"]],
    )


class Export(Strict):
    """The command that `paceline export RUN --to DIR` runs on your machine, with a snapshot of the run in
    `PACELINE_RESTORE`."""

    command: Command = Field(
        description="The command. It writes the model to the folder `PACELINE_EXPORT_DIR`, as "
        "`paceline.tensorflow.export`, `paceline.torch.export` and `paceline.jax.export` do. It runs in the `code` "
        "folder with the job's `env`, as a single process.",
        examples=[["python", "export.py"]],
    )
