"""A controller that a benchmark attaches is at work until the end, or nothing is reported of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autotune.control.controllers.protocol import failure
from autotune.control.loop import Control
from runtime.errors import InputError


@contextmanager
def at_work(attached: Control) -> Iterator[Control]:
    """``attached``, detached at the end. Raises :class:`InputError` then if its controller failed meanwhile: knobs that were
    left alone from there on say nothing of it."""
    with attached:
        yield attached
    if (error := attached.failed) is not None:
        what = failure(attached.controller, error)
        raise InputError(f"the {attached.controller.name} controller failed: {what}") from error
