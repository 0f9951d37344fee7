"""What a profiling run tells whoever watches; the command line draws it, a script may ignore it."""

from __future__ import annotations

from typing import Protocol

from autotune.profiling.setup import Setup


class Reporter(Protocol):
    """Called from the thread that profiles. ``share`` runs from 0 to 1; ``left_s`` None: not known."""

    def note(self, text: str) -> None:
        """One line worth reading."""
        ...

    def ready(self, setup: Setup) -> None:
        """The load, the SLO and the rate are known."""
        ...

    def stage(self, name: str) -> None:
        """``calibrating``, ``simulating``, ``validating`` (of a callable ``measuring``) or ``capacity`` begins."""
        ...

    def progress(self, share: float, count: str, note: str, left_s: float | None) -> None: ...

    def stage_done(self, count: str, note: str) -> None: ...


class Silent:
    """Tells nobody."""

    def note(self, text: str) -> None: ...
    def ready(self, setup: Setup) -> None: ...
    def stage(self, name: str) -> None: ...
    def progress(self, share: float, count: str, note: str, left_s: float | None) -> None: ...
    def stage_done(self, count: str, note: str) -> None: ...
