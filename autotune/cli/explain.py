"""``autotune explain``: a decision log as a timeline."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from autotune.cli.exits import DONE
from autotune.cli.options import AsJson
from runtime.errors import InputError
from runtime.knobs import KNOBS

if TYPE_CHECKING:
    from autotune.control.decision_log import Decision
    from autotune.control.explain import Summary
    from autotune.control.tally import ClassTally
    from autotune.report.run.story import Run

HELP = (
    "Show what a controller did and why, and where goodput was lost: the decisions as a timeline, then how often each knob "
    "changed, how long each regime lasted, and how many requests of each class were rejected, relegated or late. LOG is the file "
    "given as autotune.control(engine, log=…) or as --decisions of autotune serve or simulate. The log of a simulation has times "
    "in seconds of virtual time. Exit codes: 0 shown, 2 LOG cannot be read."
)
_HEAVIEST = 1e300
EXAMPLES = "Examples:  autotune explain run.jsonl  ·  autotune explain run.jsonl --knob token_budget --json"


def explain(
    log: Annotated[Path, Argument(metavar="LOG", help="A decision log (JSON lines).", show_default=False)],
    knob: Annotated[
        list[str] | None,
        Option(help=f"Show only decisions about this knob: {', '.join(s.name for s in KNOBS)}. Repeatable."),
    ] = None,
    records: Annotated[
        Path | None,
        Option(
            help="The requests of the last run in LOG, as written by autotune serve --records. Needed only if LOG does not "
            "contain the end of that run."
        ),
    ] = None,
    every: Annotated[
        bool,
        Option(
            "--all",
            help="Show every decision. By default, three or more regime changes in a row that change no knob are one line.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Print the timeline; 2 when the file is no decision log."""
    from autotune.cli.display import WIDEST, make_console
    from autotune.control.decision_log import read_decisions
    from autotune.control.explain import summarize, timeline

    if every and as_json:
        raise InputError("--all is given with --json, which has every decision as it is; leave it out")
    knobs, known = knob or [], [spec.name for spec in KNOBS]
    for name in knobs:
        if name not in known:
            raise InputError(f"--knob is {name}; it must be one of {', '.join(known)}")
    try:
        decisions = list(read_decisions(log))
    except InputError:
        _check_no_profile(log)
        raise
    try:
        summary = summarize(decisions, knobs=knobs)
    except InputError as error:
        raise InputError(f"{log}: {error}") from None
    lacking = None if records is None else _add_records(summary, log, decisions, records)
    if as_json:
        shown = [d for d in decisions if not knobs or any(name in knobs for name, _, _ in d.changes)]
        changes = {name: {"count": n, "first": a, "last": b} for name, (n, a, b) in summary.changes.items()}
        found = {
            "decisions": [json.loads(decision.as_json()) for decision in shown],
            "changes": changes,
            "would_change": summary.would_change,
            "regime_seconds": {name: round(seconds, 3) for name, seconds in summary.seconds.items()},
            "outcomes": {name: one.as_dict() for name, one in summary.outcomes.items()},
            "lacking": [] if lacking is None else [lacking],
        }
        print(json.dumps(found))
        return DONE
    if not decisions:
        print(f"{log} holds no decision")
        return DONE
    for line in timeline(decisions, knobs=knobs, width=min(WIDEST, make_console().width), fold=not every):
        print(line)
    print()
    for line in summary.lines():
        print(line)
    if summary.open:
        runs = "a run that has" if summary.open == 1 else f"{summary.open} runs that have"
        hint = ": --records FILE, if autotune serve wrote one, has them" if records is None else ""
        print(f"requests  not known of {runs} no end in this log{hint}")
    if lacking is not None:
        print(f"records   {lacking}")
    return DONE


def _check_no_profile(log: Path) -> None:
    """Raise one line if ``log`` is a profile's file or name."""
    from autotune.profile import find_profile
    from autotune.profile.callable import CallableProfile, load_either

    loaded = None
    with suppress(InputError):
        loaded = load_either(find_profile(log))
    if loaded is None:
        return
    name = shlex.quote(str(log))
    drawn = "" if isinstance(loaded, CallableProfile) else f", `autotune report {name}` draws it"
    raise InputError(f"{log}: is a profile, not a decision log; `autotune show {name}` prints it{drawn}")


def _add_records(summary: Summary, log: Path, decisions: Sequence[Decision], records: Path) -> str | None:
    """Count the requests of the last run in ``summary``; else why not, in a sentence."""
    from autotune.report.run import read_run

    run = read_run(log, records, decisions=decisions)
    if not summary.last_open:
        return f"the last run has ended, and its requests are in the log: {records} adds nothing"
    if not run.records:
        return run.unrecorded
    if not run.slo_periods:
        return f"the log does not state the SLO of its last run: the {len(run.records)} requests in {records} cannot be judged"
    summary.add_last(_outcomes(log, run))
    return None


def _outcomes(log: Path, run: Run) -> dict[str, ClassTally]:
    """How the requests of ``run`` ended, by class, each judged by the SLO of when it came."""
    from autotune.control.tally import ClassTally

    weights = run.decisions[0].evidence.get("weights", {})
    if not isinstance(weights, dict) or not all(
        isinstance(weight, int | float) and 0 < weight <= _HEAVIEST for weight in weights.values()
    ):
        raise InputError(f"{log}: the weights of the attach are {weights!r:.40}; they must be numbers by class")
    found: dict[str, ClassTally] = {}
    for record in run.records:
        name = run.class_of(record)
        if (slo := run.slo_of(name, record.arrival)) is not None:
            found.setdefault(name, ClassTally(weight=float(weights.get(name, 1.0)))).add(record, slo)
    return found
