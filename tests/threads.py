"""Several threads at the same work."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(work: Callable[[int], object], count: int, timeout_s: float = 60.0) -> None:
    """Call ``work`` with 0, 1, 2, … in ``count`` threads at once, and wait until all have ended. Fails when one has not."""
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    assert not any(thread.is_alive() for thread in threads), "a thread has not ended"
