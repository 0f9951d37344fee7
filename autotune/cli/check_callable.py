"""``autotune check`` of the profile of a callable; wiring only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.profile.callable import CallableProfile
    from autotune.profiling.check import Check


def measured(
    profile: CallableProfile,
    path: Path,
    inputs: Path | None,
    budget_s: float,
    threshold: float,
    console: Console,
    stop: Any,
) -> Check:
    """Import the profile's function, and time it with ``inputs``."""
    from autotune.cli.display import Display
    from autotune.profile.fingerprint import OtherWork
    from autotune.profiling.check import check_calls
    from autotune.profiling.subject import load_subject

    if inputs is None:
        raise InputError(
            f"{path}: is the profile of a callable ({profile.function!r}), and --inputs is missing; name the file with its "
            f"inputs, {profile.inputs.file} at the time"
        )
    subject = load_subject(profile.function, inputs, profile.inputs.cost)
    display, work = Display(console, ""), OtherWork()
    display.stage("checking")
    try:
        found = check_calls(
            profile,
            subject,
            budget_s=budget_s,
            threshold=threshold,
            stop=stop,
            advance=lambda share, note: display.progress(share, note, "", None),
            taken=lambda: work.taken(profile.machine.threads or 1),
        )
        display.stage_done(f"{found.rounds} rounds", "")
    finally:
        display.close()
    return found
