"""What the commands of these benchmarks have in common: their options, checked, and what they say while they run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from autotune.bench import Contender, Result
from benchmarks.live.loads import Case


def command(name: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks.NAME``; its help begins with the docstring ``about``."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


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


def say_turn(case: Case, result: Result, more: str = "") -> None:
    """A turn is over."""
    s = result.score
    say(
        f"  round {result.turn.round} {case.name:<12} {result.turn.contender.name:<26} {s.attainment:6.1%} of {s.offered:4} "
        f"TTFT {s.ttft_ms.p50 or 0:5.0f}/{s.ttft_ms.p99 or 0:5.0f} TPOT {s.tpot_ms.p50 or 0:5.1f}/{s.tpot_ms.p99 or 0:6.1f} "
        f"missed {s.violations}, steps {s.steps.mean_ms:.1f} ms{more}"
    )


def say_failed(case: Case, contender: Contender, cause: str) -> None:
    say(f"  {case.name}: the turn of {contender.name} is left out: {cause}")
