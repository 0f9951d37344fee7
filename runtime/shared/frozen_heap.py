"""No full garbage collection while it matters how long anything takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Leave what is on the heap now out of garbage collections until the block ends.

    With PyTorch and transformers loaded, a full collection stops every thread for 0.2 s, and what a measurement records brings
    one about. Where somebody has frozen the heap already, that stays as it is.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
