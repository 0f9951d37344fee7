"""``--class NAME:SLO[*WEIGHT]``: request classes on a command line."""

from __future__ import annotations

from collections.abc import Sequence

from runtime import slo
from runtime.errors import InputError
from runtime.slo import RequestClass


def request_classes(texts: Sequence[str]) -> list[RequestClass]:
    """As :func:`runtime.slo.request_classes`. Raises :class:`InputError`."""
    try:
        return slo.request_classes(texts, where="--class")
    except ValueError as error:
        raise InputError(str(error)) from None
