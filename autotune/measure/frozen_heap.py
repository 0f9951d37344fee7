"""No full garbage collection while it matters how long anything takes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_users = 0
_others = False  # somebody else has frozen the heap


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Leave what is on the heap now out of garbage collections until the block ends, and those of other threads.

    With PyTorch and transformers loaded, a full collection stops every thread for 0.2 s, and what a measurement records brings
    one about. Where somebody else has frozen the heap, that stays as it is. Reference cycles that are there already are not
    freed within the block, not by ``gc.collect()`` either.
    """
    global _users, _others
    with _lock:
        if not _users:
            _others = gc.get_freeze_count() > 0
            if not _others:
                gc.freeze()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and not _others:
                gc.unfreeze()
