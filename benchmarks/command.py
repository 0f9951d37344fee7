"""What the commands of the benchmarks have in common: their options, checked, what they say while they run, and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec

from runtime.errors import InputError

BAD_INPUT: Final = 2
INTERRUPTED: Final = 130  # Ctrl-C (128 + SIGINT)
P = ParamSpec("P")


def command(name: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks.NAME``; its help begins with the docstring ``about``."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def exit_code(interrupted: str = "interrupted") -> Callable[[Callable[P, int | None]], Callable[P, int]]:
    """Decorates a benchmark's ``main``, which then returns the exit code of its process.

    0, or what ``main`` itself returns; 2 after an :class:`InputError`, which is printed on stderr; 130 after Ctrl-C, which is
    answered with the line ``interrupted``.
    """

    def decorate(main: Callable[P, int | None]) -> Callable[P, int]:
        @wraps(main)
        def run(*args: P.args, **options: P.kwargs) -> int:
            try:
                return main(*args, **options) or 0
            except InputError as error:
                say(f"error: {error}")
                return BAD_INPUT
            except KeyboardInterrupt:
                say(interrupted)
                return INTERRUPTED

        return run

    return decorate


def seconds(least: float = 1, most: float = 3600) -> Callable[[str], float]:
    """The type of an option in seconds."""

    def parse(text: str) -> float:
        value = _number(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} s; it must be {least:g} to {most:g}")
        return value

    return parse


def share(text: str) -> float:
    """Of what an engine completes when it is kept full."""
    value = _number(text)
    if not 0.1 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text}; it must be 0.1 to 2, such as 0.9")
    return value


def deviation(text: str) -> float:
    """Of a machine's speed."""
    value = _number(text)
    if not 0 <= value <= 0.5:
        raise argparse.ArgumentTypeError(f"{text}; it must be 0 to 0.5, such as 0.15")
    return value


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that counts, without an upper bound."""

    def parse(text: str) -> int:
        value = _number(text)
        if not (value >= least and value.is_integer()):
            raise argparse.ArgumentTypeError(f"{text}; it must be a whole number from {least} on")
        return int(value)

    return parse


def count(text: str) -> int:
    value = _number(text)
    if not (1 <= value <= 100 and value.is_integer()):
        raise argparse.ArgumentTypeError(f"{text}; it must be a whole number from 1 to 100")
    return int(value)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0  # within none of the bounds


def say(text: str) -> None:
    """Progress goes to standard error."""
    print(text, file=sys.stderr, flush=True)
