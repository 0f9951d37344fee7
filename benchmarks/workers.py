"""Worker processes that end when the process that started them ends, however it does."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """For the initializer of a pool: a worker that waits for work never hears that its parent was killed."""
    threading.Thread(target=_wait, name="ends with parent", daemon=True).start()


def _wait() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is no worker process"
    parent.join()
    os._exit(1)
