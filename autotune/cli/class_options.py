"""``--class NAME:SLO[*WEIGHT]``: request classes on a command line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from runtime import slo
from runtime.errors import InputError
from runtime.slo import RequestClass

if TYPE_CHECKING:
    from autotune.workload import Workload

HELP = "Requests of class NAME have an SLO and a weight of their own: chat:ttft=300ms,tpot=30ms, batch:e2e=60s*0.2. Repeatable."
METAVAR = "NAME:SLO[*WEIGHT]"
_LOOKED_AT = 2000  # requests of a workload


def request_classes(texts: Sequence[str]) -> list[RequestClass]:
    """As :func:`runtime.slo.request_classes`. Raises :class:`InputError`."""
    try:
        return slo.request_classes(texts, where="--class")
    except ValueError as error:
        raise InputError(str(error)) from None


def check_classes(classes: Sequence[RequestClass], workload: Workload) -> None:
    """Raise :class:`InputError` for a class of which ``workload`` has no request."""
    if not classes:
        return
    found = dict.fromkeys(
        arrival.request_class for arrival in islice(workload.arrivals(0, limit=_LOOKED_AT), _LOOKED_AT)
    )
    for one in classes:
        if one.name not in found:
            raise InputError(
                f"--class {one.name}: the workload has no request of that class; its classes are {', '.join(found)} "
                f"(--workload {one.name}=azure-conv@0.8+… names them)"
            )
