"""The `tensorboard` section of a job file: true, false, or a mapping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, create_model

from paceline.job import values
from paceline.job.errors import BadValueError, describe
from paceline.job.fields import Memory, Strict, choice
from paceline.job.kubernetes_section import Image, ObjectName

SERVICES = ("ClusterIP", "NodePort", "LoadBalancer")


class _Ingress(Strict):
    """An Ingress for TensorBoard."""

    host: ObjectName = Field(description="The host name of the Ingress.", examples=["digits.example.com"])
    tls: ObjectName | None = Field(
        default=None,
        description="A Secret in the namespace with the certificate for `host`. Default: no TLS.",
        examples=["digits-tls"],
    )


if TYPE_CHECKING:
    Ingress = _Ingress
else:  # `class` is a keyword
    _CLASS = Field(default=None, description="The IngressClass. Default: the cluster's default.")
    Ingress = create_model(
        "Ingress", __base__=_Ingress, __doc__=_Ingress.__doc__, **{"class": (ObjectName | None, _CLASS)}
    )


class TensorBoard(Strict):
    """TensorBoard for the run. `true` enables it with the defaults."""

    image: Image | None = Field(
        default=None,
        description="Clusters only: the image that TensorBoard runs in. Default: `kubernetes.image`, which must "
        "contain it.",
        examples=["tensorflow/tensorflow:2.20.0"],
    )
    memory: Memory | None = Field(
        default=None,
        description="Memory limit: TensorBoard is restarted if it uses more. Default: 1Gi, with a request of 256Mi "
        "on a cluster.",
        examples=["2Gi"],
    )
    service: Annotated[str, *choice(SERVICES, {"cluster": "ClusterIP", "node": "NodePort"})] | None = Field(
        default=None,
        description="Clusters only: publish TensorBoard with a Service of this type. TensorBoard has no "
        "authentication. Default: it can be reached only with `paceline tensorboard`.",
    )
    ingress: Ingress | None = Field(
        default=None,
        description="Clusters only: publish TensorBoard with an Ingress. TensorBoard has no authentication.",
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
        message = f"must be true, false or a mapping, got {describe(value)}"
        raise BadValueError(message, error.hint, "true, false, a mapping") from None


TensorBoardField = Annotated[TensorBoard | None, BeforeValidator(_mapping)]
