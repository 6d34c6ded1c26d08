"""What a job file says of its model: the commands that try a snapshot, and export it."""

from __future__ import annotations

from pydantic import Field

from paceline.job.fields import Command, Strict

NAMES = ("try", "export")


class Try(Strict):
    """What `paceline try RUN -- ARGS` runs on the person's machine, with a snapshot of the run as
    `PACELINE_RESTORE`."""

    command: Command = Field(
        description="The words before ARGS. Runs in the `code` folder with the job's `env`, as one plain process.",
        examples=[["python", "translate.py"]],
    )


class Export(Strict):
    """What `paceline export RUN --to DIR` runs on the person's machine, with a snapshot of the run as
    `PACELINE_RESTORE`."""

    command: Command = Field(
        description="Writes the model to the folder `PACELINE_EXPORT_DIR`, as `paceline.tensorflow.export`, "
        "`paceline.torch.export` and `paceline.jax.export` do. Runs in the `code` folder with the job's `env`, as one "
        "plain process.",
        examples=[["python", "export.py"]],
    )
