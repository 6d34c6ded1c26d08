"""What a job file says of TensorBoard: true, false, or a mapping, as pydantic models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, create_model

from paceline.job import values
from paceline.job.cluster import Image, ObjectName
from paceline.job.errors import BadValueError, described
from paceline.job.fields import Memory, Strict, choice

SERVICES = ("ClusterIP", "NodePort", "LoadBalancer")


class _Ingress(Strict):
    """An Ingress of the cluster that leads to TensorBoard."""

    host: ObjectName = Field(description="The name that people open it by.", examples=["digits.example.com"])
    tls: ObjectName | None = Field(
        default=None,
        description="A Secret of the namespace with the certificate for `host`. Unset: without TLS.",
        examples=["digits-tls"],
    )


if TYPE_CHECKING:
    Ingress = _Ingress
else:  # `class` is a keyword
    _CLASS = Field(default=None, description="The class of the Ingress. Unset: the cluster's default.")
    Ingress = create_model(
        "Ingress", __base__=_Ingress, __doc__=_Ingress.__doc__, **{"class": (ObjectName | None, _CLASS)}
    )


class TensorBoard(Strict):
    """TensorBoard beside the run. `true` is all of these as they are when they are not set."""

    image: Image | None = Field(
        default=None,
        description="Clusters only: the image that it runs in. Unset: `kubernetes.image`, which must have it.",
        examples=["tensorflow/tensorflow:2.20.0"],
    )
    memory: Memory | None = Field(
        default=None,
        description="What it may use: with more, it is started again. Unset: 1Gi, of which a cluster sets 256Mi aside.",
        examples=["2Gi"],
    )
    service: Annotated[str, *choice(SERVICES, {"cluster": "ClusterIP", "node": "NodePort"})] | None = Field(
        default=None,
        description="Clusters only: publish it by a Service of this type. TensorBoard asks nobody who they are. "
        "Unset: only `paceline tensorboard` leads there.",
    )
    ingress: Ingress | None = Field(
        default=None,
        description="Clusters only: publish it by an Ingress. TensorBoard asks nobody who they are.",
        examples=[{"host": "digits.example.com", "class": "nginx", "tls": "digits-tls"}],
    )


def _mapping(value: Any) -> Any:
    if value is True:
        return {}
    if value is False:
        return None
    if isinstance(value, dict | TensorBoard):
        return value
    try:
        return values.switch(value)
    except BadValueError as error:
        message = f"must be true, false or a mapping, got {described(value)}"
        raise BadValueError(message, error.hint, "true, false, a mapping") from None


Beside = Annotated[TensorBoard | None, BeforeValidator(_mapping)]
