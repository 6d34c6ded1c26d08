"""The `serve` section of a job file: serving the model on a cluster."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from paceline.job.fields import Cpu, Gpus, Memory, Strict, choice, whole
from paceline.job.kubernetes_section import Image
from paceline.job.tensorboard_section import SERVICES

MAX_REPLICAS = 1000
TENSORFLOW_SERVING = "tensorflow/serving:2.19.1"


class Serve(Strict):
    """How `paceline serve RUN --on kubernetes` serves the model that `export` creates from a snapshot."""

    replicas: Annotated[int, *whole(1, MAX_REPLICAS)] = Field(default=1, description="The number of pods.")
    image: Image | None = Field(
        default=None,
        description="The image that serves the model. An image whose name ends with `tensorflow/serving` is started as "
        "TensorFlow Serving; any other image must contain `paceline[serve]` and the framework. "
        f"Default: `{TENSORFLOW_SERVING}`, for TensorFlow only.",
        examples=[TENSORFLOW_SERVING],
    )
    cpu: Cpu | None = Field(
        default=None, description="Cores of each pod. Default: the cluster's default.", examples=[2]
    )
    memory: Memory | None = Field(
        default=None, description="Memory of each pod. Default: the cluster's default.", examples=["2Gi"]
    )
    gpus: Gpus | None = Field(default=None, description="GPUs of each pod. Default: none.", examples=[1])
    service: Annotated[str, *choice(SERVICES, {"cluster": "ClusterIP", "node": "NodePort"})] = Field(
        default="ClusterIP",
        description="The type of the Service. It has no authentication.",
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
