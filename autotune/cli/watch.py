"""``autotune watch``: a live controller, seen from another terminal."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from autotune.cli.connection import ENDED, TARGET_HELP, ask, choose
from autotune.cli.exits import DONE
from runtime.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, RenderableType
    from rich.text import Text

    from autotune.control.decision_log import Decision

HELP = (
    "Watch a live controller: its knobs, attainment, its regime, and its last decisions. Ctrl-C ends "
    "watching, not the process. Exit codes: 0 watched until Ctrl-C or its end; 2 no such process, or several to choose from."
)
EXAMPLES = "Examples:  autotune watch  ·  autotune watch 4711 --once --json"
_SHOWN = 8  # decisions in the live view


def watch(
    target: Annotated[str | None, Argument(metavar="[PID|SOCKET]", help=TARGET_HELP, show_default=False)] = None,
    once: Annotated[bool, Option("--once", help="Print how it stands now, and end.")] = False,
    every: Annotated[float, Option(help="Seconds between looks.", min=0.1)] = 1.0,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object a look.")] = False,
) -> int:
    """Watch until Ctrl-C, or until it ends."""
    from autotune.cli.display import make_console
    from autotune.cli.interrupt import stop_on_interrupt

    path, console = choose(target), make_console()
    view = _Live(console) if console.is_terminal and not as_json else _Lines(as_json=as_json)
    try:
        if once:
            _show_once(console, *_look(path), as_json=as_json)
            return DONE
        with stop_on_interrupt() as stop, view:
            while not stop.is_set():
                view.show(*_look(path))
                stop.wait(every)
    except ConnectionError as error:
        if not view.shown:
            raise InputError(str(error)) from None
        why = str(error) if path.exists() else f"{path}: {ENDED}"
        console.print(why, markup=False, highlight=False, soft_wrap=True)
    return DONE


def _look(path: Path) -> tuple[dict[str, Any], list[Decision]]:
    from autotune.control.decision_log import Decision

    status = ask(path, "status")["status"]
    decisions = ask(path, "decisions", last=_SHOWN)["decisions"]
    return status, [Decision.of(fields) for fields in decisions]


def _show_once(console: Console, status: dict[str, Any], decisions: list[Decision], *, as_json: bool) -> None:
    if as_json:
        print(_as_json(status, decisions))
    else:
        console.print(_table(status, decisions, width=console.width))


def _as_json(status: dict[str, Any], decisions: list[Decision]) -> str:
    return json.dumps({"status": status, "decisions": [json.loads(d.as_json()) for d in decisions]})


class _Lines:
    """For a pipe: a line a look, and every decision once, as it comes."""

    def __init__(self, *, as_json: bool) -> None:
        self.shown = 0
        self._as_json = as_json
        self._seen: list[Decision] = []

    def show(self, status: dict[str, Any], decisions: list[Decision]) -> None:
        from autotune.control.explain import timeline

        if self._as_json:
            print(_as_json(status, decisions), flush=True)
        else:
            for line in timeline((d for d in decisions if d not in self._seen), dates=False):
                print(line)
            print(f"{time.strftime('%H:%M:%S')}      {status['line']}", flush=True)
        self._seen = decisions
        self.shown += 1

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class _Live:
    """For a terminal: one picture, drawn again at every look."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self.shown = 0
        self._live = Live(console=console, auto_refresh=False)

    def show(self, status: dict[str, Any], decisions: list[Decision]) -> None:
        self._live.update(_table(status, decisions), refresh=True)
        self.shown += 1

    def __enter__(self) -> _Live:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()


def _latency(found: dict[str, float], target: float | None) -> Text:
    """Median and 99th percentile, against the target if there is one: red where half of the requests miss it."""
    from rich.text import Text

    from autotune.report.tables import latency

    text = Text(f"p50 {latency(found['p50'])}  p99 {latency(found['p99'])}")
    if target is not None:
        style = "red" if found["p50"] > target else "yellow" if found["p99"] > target else "green"
        text.append(f"  target {target:g} ms", style=style)
    return text


def _table(status: dict[str, Any], decisions: list[Decision], *, width: int | None = None) -> RenderableType:
    """How it stands. ``width``: columns that reasons are folded to; without, each line is cut where the terminal ends."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from autotune.control.explain import timeline
    from autotune.control.status import OVERDUE_S
    from runtime.knobs import KNOBS

    wanted = status["slo"].partition("@")[2]
    share = "no request has ended yet"
    if status["attainment"] is not None:
        share = f"{status['attainment']:.1%} of the last {status['offered']} (target {wanted})"
    marks = [word for word in ("paused", "observe_only", "ended") if status[word]]
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row("process", Text(f"{status['pid']}, {status['controller']} controller {' '.join(marks)}".rstrip()))
    facts.add_row("SLO", Text(status["slo"]))
    facts.add_row("attainment", Text(share))
    if status["rejections"]:
        rejected = ", ".join(f"{count} {cause}" for cause, count in sorted(status["rejections"].items()))
        facts.add_row("rejected", Text(f"{rejected} of the last {status['offered']}"))
    several = len(status["classes"]) > 1
    for name, fared in status["classes"].items():
        if several and fared["offered"]:
            facts.add_row(name, Text(f"{fared['attainment']:.1%} of {fared['offered']} within {fared['slo']}"))
        for metric, found in fared["latencies_ms"].items():
            facts.add_row(f"{name} {metric}" if several else metric, _latency(found, fared["targets_ms"].get(metric)))
    facts.add_row("regime", Text(status["regime"]))
    if (status["overdue_s"] or 0.0) >= OVERDUE_S:
        facts.add_row("step records", Text(f"no step record for {status['overdue_s']:.1f} s", style="red"))
    for spec in KNOBS:
        if spec.name not in status["without"]:
            value = status["knobs"][spec.name]
            most = " (the ceiling)" if value and value == status["ceilings"][spec.name] else ""
            facts.add_row(spec.name, Text(f"{value:.10g} {spec.unit}{most}"))
    shown = timeline(decisions, dates=False, width=width)
    lines = [Text(line) if width else Text(line, no_wrap=True, overflow="ellipsis") for line in shown]
    return Group(facts, Text(""), *(lines if width else lines[-2 * _SHOWN :]))
