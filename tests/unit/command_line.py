"""The programs under ``benchmarks`` as typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def exit_code(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """What ``main`` ends with, by its own refusal or by argparse's."""
    try:
        return main(words)
    except SystemExit as error:
        return int(error.code or 0)
