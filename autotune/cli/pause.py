"""``autotune pause`` and ``autotune resume``: take the knobs out of a live controller's hands, and give them back."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from autotune.cli.connection import CODES, TARGET_HELP, tell
from autotune.cli.exits import DONE

HELP = (
    "Pause a live controller: the controller stops changing the knobs, but goes on learning. A pause also turns off the "
    "controller's per-step token budgets, so the controller first sets the knobs once more, to values that suit steps without "
    "these budgets. With --kill, the controller is detached and the engine gets back the knobs from "
    f"before the controller was attached. {CODES}"
)
EXAMPLES = "Examples:  autotune pause  ·  autotune pause 4711 --kill"
RESUME_HELP = f"Resume a paused controller: the controller changes the knobs again. {CODES}"
RESUME_EXAMPLES = "Examples:  autotune resume  ·  autotune resume 4711 --json"

Target = Annotated[str | None, Argument(metavar="[PID|SOCKET]", help=TARGET_HELP, show_default=False)]
AsJson = Annotated[bool, Option("--json", help="Print the controller's status as one JSON object.")]


def pause(
    target: Target = None,
    kill: Annotated[
        bool, Option("--kill", help="Detach the controller, and restore the knobs from before it was attached.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Pause, or kill; print how it stands then."""
    tell(target, "kill" if kill else "pause", as_json=as_json)
    if kill and not as_json:
        print("the controller is switched off, and the engine goes on without it; a restart brings it back")
    return DONE


def resume(target: Target = None, as_json: AsJson = False) -> int:
    """Resume; print how it stands then."""
    tell(target, "resume", as_json=as_json)
    return DONE
