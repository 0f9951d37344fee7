"""``autotune set``: turn a live engine's knobs by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from typer import Argument, Option

from autotune.cli.connection import CODES, TARGET_HELP, tell
from autotune.cli.exits import DONE
from runtime.errors import InputError
from runtime.knobs import KNOBS

HELP = (
    "Set knobs of a live engine by hand, from the next step on. The controller is paused, so that it does not undo the change; "
    f"autotune resume ends the pause. {CODES}\n\nThe knobs: {'; '.join(f'{s.name} ({s.unit}): {s.doc}' for s in KNOBS)}."
)
EXAMPLES = (
    "Examples:  autotune set max_batch_size=32 token_budget=512  ·  autotune set --process 4711 max_wait_ms=0 --json"
)


def set_knobs(
    settings: Annotated[
        list[str], Argument(metavar="KNOB=VALUE...", help="One or more knobs and their values.", show_default=False)
    ],
    process: Annotated[
        str | None, Option("--process", metavar="PID|SOCKET", help=TARGET_HELP, show_default=False)
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print the controller's status as one JSON object.")] = False,
) -> int:
    """Set them; 2 when one is no knob, or the engine refuses it."""
    tell(process, "set", as_json=as_json, knobs=parse_settings(settings))
    return DONE


def parse_settings(settings: Sequence[str]) -> dict[str, float]:
    """``KNOB=VALUE`` words as knobs; raises :class:`InputError`. The ceilings are the engine's to check."""
    known = {spec.name: spec for spec in KNOBS}
    values: dict[str, float] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise InputError(f"{text!r} sets no knob; write KNOB=VALUE, with a knob of {', '.join(known)}")
        if name in values:
            raise InputError(f"{name} is given twice")
        try:
            values[name] = known[name].read(value)
        except ValueError as error:
            raise InputError(str(error)) from None
    return values
