"""What a job file says of serving its model on a cluster, as a pydantic model."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from paceline.job.board import SERVICES
from paceline.job.cluster import Image
from paceline.job.fields import Cpu, Gpus, Memory, Strict, choice, whole

MOST_REPLICAS = 1000
TENSORFLOW_SERVING = "tensorflow/serving:2.19.1"


class Serve(Strict):
    """How `paceline serve RUN --on kubernetes` serves what `export` makes of a snapshot."""

    replicas: Annotated[int, *whole(1, MOST_REPLICAS)] = Field(default=1, description="How many pods serve it.")
    image: Image | None = Field(
        default=None,
        description="The image that serves it. One whose name ends with `tensorflow/serving` is started as TensorFlow "
        "Serving; any other holds `paceline[serve]` and the framework. "
        f"Unset: `{TENSORFLOW_SERVING}`, for TensorFlow only.",
        examples=[TENSORFLOW_SERVING],
    )
    cpu: Cpu | None = Field(default=None, description="Cores of each pod. Unset: as the cluster has it.", examples=[2])
    memory: Memory | None = Field(
        default=None, description="Memory of each pod. Unset: as the cluster has it.", examples=["2Gi"]
    )
    gpus: Gpus | None = Field(default=None, description="GPUs of each pod. Unset: none.", examples=[1])
    service: Annotated[str, *choice(SERVICES, {"cluster": "ClusterIP", "node": "NodePort"})] = Field(
        default="ClusterIP",
        description="The type of the Service that leads to it. Whoever reaches it is asked nothing.",
    )


def is_tensorflow_serving(image: str) -> bool:
    """
    >>> is_tensorflow_serving("mirror.example:5000/tensorflow/serving:2.19.1-gpu")
    True
    >>> is_tensorflow_serving("team/serving:1")
    False
    """
    name = re.sub(r":[^/]*$", "", image.partition("@")[0])
    return f"/{name}".endswith("/tensorflow/serving")
