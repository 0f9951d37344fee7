"""``autotune explain``: a decision log as a timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from autotune.cli.exits import DONE
from runtime.errors import InputError
from runtime.knobs import KNOBS

HELP = (
    "Show what a controller did, and why: LOG as a timeline, then how often each knob was changed and how long each regime "
    "lasted. LOG is the file given as autotune.control(engine, log=…) or autotune serve --decisions. Exit codes: 0 shown, 2 LOG "
    "cannot be read."
)
EXAMPLES = "Examples:  autotune explain run.jsonl  ·  autotune explain run.jsonl --knob token_budget --json"


def explain(
    log: Annotated[Path, Argument(metavar="LOG", help="A decision log (JSON lines).", show_default=False)],
    knob: Annotated[
        list[str] | None,
        Option(help=f"Only decisions about this knob; may be repeated. {', '.join(s.name for s in KNOBS)}."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object only.")] = False,
) -> int:
    """Print the timeline; 2 when the file is no decision log."""
    from autotune.cli.display import WIDEST, make_console
    from autotune.control.decision_log import read_decisions
    from autotune.control.explain import summarize, timeline

    knobs, known = knob or [], [spec.name for spec in KNOBS]
    for name in knobs:
        if name not in known:
            raise InputError(f"--knob is {name}; it must be one of {', '.join(known)}")
    decisions = list(read_decisions(log))
    summary = summarize(decisions, knobs=knobs)
    if as_json:
        shown = [d for d in decisions if not knobs or any(name in knobs for name, _, _ in d.changes)]
        changes = {name: {"count": n, "first": a, "last": b} for name, (n, a, b) in summary.changes.items()}
        found = {
            "decisions": [json.loads(decision.as_json()) for decision in shown],
            "changes": changes,
            "would_change": summary.would_change,
            "regime_seconds": {name: round(seconds, 3) for name, seconds in summary.seconds.items()},
        }
        print(json.dumps(found))
        return DONE
    if not decisions:
        print(f"{log} holds no decision")
        return DONE
    for line in timeline(decisions, knobs=knobs, width=min(WIDEST, make_console().width)):
        print(line)
    print()
    for line in summary.lines():
        print(line)
    return DONE
