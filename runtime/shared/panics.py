"""Code in Rust that panics, such as a tokenizer's, raises what is no ``Exception``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def panics_as_errors(what: str) -> Iterator[None]:
    """Raise a panic of ``what`` as ``RuntimeError``; Ctrl-C and ``SystemExit`` are none."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:
        raise RuntimeError(f"{what} broke: {panic!r}") from panic
