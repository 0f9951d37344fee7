"""Many prompts at once: submit them as fast as there is room, and collect what comes of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from runtime.errors import RejectedError
from runtime.llm.stream import Completion, Stream


def complete_all(
    submit: Callable[[int], Stream],
    count: int,
    *,
    most: int,
    return_exceptions: bool,
    advance: Callable[[], None],
) -> list[Completion | Exception]:
    """The completions of requests 0…``count`` − 1, in that order, with at most ``most`` of them submitted at a time.

    When the queue is full with the requests of others, it waits for its own to make room. With ``return_exceptions`` what
    a request raised, at submit or later, stands in its place; otherwise the first such error is raised and those that
    still run are cancelled, as they are on Ctrl-C. ``advance`` is called as each is collected.
    """
    results: list[Completion | Exception] = [RuntimeError("not collected")] * count
    running: deque[tuple[int, Stream]] = deque()

    def collect() -> None:
        index, stream = running[0]
        try:
            results[index] = stream.result()
        except Exception as error:
            keep(index, error)
        running.popleft()
        advance()

    def keep(index: int, error: Exception) -> None:
        if not return_exceptions:
            error.add_note(f"this was prompt {index} of {count}, counted from 0")
            raise error
        results[index] = error

    def start(index: int) -> bool:
        try:
            running.append((index, submit(index)))
        except Exception as error:
            if isinstance(error, RejectedError) and error.reason == "queue_full" and running:
                return False
            keep(index, error)
            advance()
        return True

    try:
        for index in range(count):
            if len(running) >= most:
                collect()
            while not start(index):
                collect()
        while running:
            collect()
    finally:
        for _, stream in running:
            stream.cancel()
    return results
