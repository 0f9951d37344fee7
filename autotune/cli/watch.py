"""``autotune watch``: a live controller, seen from another terminal."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from autotune.cli.connection import ENDED, TARGET_HELP, ask, choose, understood
from autotune.cli.exits import DONE
from runtime.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, RenderableType
    from rich.text import Text

    from autotune.control.decision_log import Decision

HELP = (
    "Watch a live controller: knobs, attainment, regime and last decisions. Ctrl-C ends watching, not the process. "
    "Exit codes: 0 Ctrl-C, the controller ended, or nobody reads the output any more; 2 no such process, or more than one to "
    "choose from."
)
EXAMPLES = "Examples:  autotune watch  ·  autotune watch 4711 --once --json"
_SHOWN = 8  # decisions in the live view
_LONGEST_S = 3600.0  # between two looks


def watch(
    target: Annotated[str | None, Argument(metavar="[PID|SOCKET]", help=TARGET_HELP, show_default=False)] = None,
    once: Annotated[bool, Option("--once", help="Print the present status once, and exit.")] = False,
    every: Annotated[float, Option(help="Seconds between updates.", min=0.1, max=_LONGEST_S)] = 1.0,
    as_json: Annotated[
        bool,
        Option(
            "--json", help="Print one JSON object per update: the status, and the decisions since the previous update."
        ),
    ] = False,
) -> int:
    """Watch until Ctrl-C, or until it ends."""
    from autotune.cli.display import make_console
    from autotune.cli.interrupt import stop_on_interrupt
    from autotune.cli.output import reader_has_gone

    path, console = choose(target), make_console()
    view = _Live(console) if console.is_terminal and not as_json else _Lines(as_json=as_json)
    look: _Look | None = None
    try:
        if once:
            look = _look(path)
            with understood(path):
                drawn = _as_json(look) if as_json else _table(look.status, look.decisions, width=console.width)
            if as_json:
                print(drawn)
            else:
                console.print(drawn)
            return DONE
        with stop_on_interrupt(at_once=True) as stop, view:
            while not stop.is_set():
                look = _look(path, look)
                with understood(path):
                    show = view.drawn(look)
                show()
                if reader_has_gone():
                    break
                stop.wait(every)
    except ConnectionError as error:
        if look is None:
            raise InputError(str(error)) from None
        why = str(error) if path.exists() else f"{path}: {ENDED}"
        said = make_console(stderr=True) if as_json else console  # stdout is JSON alone
        said.print(why, markup=False, highlight=False, soft_wrap=True)
    return DONE


class _Look(NamedTuple):
    """``decisions``: those since the look before, of the first look the last few; ``missed``: how many more there were, which the
    controller no longer has; ``total``: how many there have ever been."""

    status: dict[str, Any]
    decisions: list[Decision]
    missed: int
    total: int


def _look(path: Path, before: _Look | None = None) -> _Look:
    from autotune.control.decision_log import Decision

    wanted = {"last": _SHOWN} if before is None else {"since": before.total}
    with understood(path):
        status = ask(path, "status")["status"]
        reply = ask(path, "decisions", **wanted)
        decisions, total = [Decision.of(fields) for fields in reply["decisions"]], reply["total"]
        restarted = before is None or total < before.total  # then it counts anew
        return _Look(status, decisions, 0 if restarted else total - wanted["since"] - len(decisions), total)


def _as_json(look: _Look) -> str:
    decisions = [json.loads(d.as_json()) for d in look.decisions]
    return json.dumps({"status": look.status, "decisions": decisions, "missed": look.missed})


class _Lines:
    """For a pipe: a line a look, and every decision once, as it comes."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def drawn(self, look: _Look) -> Callable[[], None]:
        """What prints it."""
        from autotune.control.explain import timeline

        if self._as_json:
            lines = [_as_json(look)]
        else:
            now = time.strftime("%H:%M:%S")
            lines = [f"{now}      {look.missed} decisions are missing here: the controller keeps the latest"] * (
                look.missed > 0
            )
            lines += [*timeline(look.decisions, dates=False), f"{now}      {look.status['line']}"]
        return partial(print, "\n".join(lines), flush=True)

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class _Live:
    """For a terminal: one picture, drawn again at every look."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._live = Live(console=console, auto_refresh=False)
        self._decisions: deque[Decision] = deque(maxlen=_SHOWN)

    def drawn(self, look: _Look) -> Callable[[], None]:
        """What prints it."""
        self._decisions.extend(look.decisions)
        return partial(self._live.update, _table(look.status, [*self._decisions]), refresh=True)

    def __enter__(self) -> _Live:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()


def _latency(found: dict[str, float] | None, target: float | None) -> Text:
    """Median and 99th percentile, against the target if there is one: red where half of the requests miss it. None: no request
    has any."""
    from rich.text import Text

    from autotune.report.tables import latency

    text = Text("–" if found is None else f"p50 {latency(found['p50'])}  p99 {latency(found['p99'])}")
    if target is not None:
        style = ""
        if found is not None:
            style = "red" if found["p50"] > target else "yellow" if found["p99"] > target else "green"
        text.append(f"  target {target:g} ms", style=style)
    return text


def _table(status: dict[str, Any], decisions: list[Decision], *, width: int | None = None) -> RenderableType:
    """How it stands. ``width``: columns that reasons are folded to; without, each line is cut where the terminal ends."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from autotune.control.explain import timeline
    from autotune.control.status import JUDGED, OVERDUE_S
    from runtime.knobs import KNOBS
    from runtime.slo import METRICS, SLO, common_target, in_percent

    required = {name: SLO.parse(fared["slo"]).attainment for name, fared in status["classes"].items()}
    target = common_target(required.values())  # else each class has its own below
    share = "no request has ended yet"
    if status["attainment"] is not None:
        wanted = "" if target is None else f" (target {target * 100:g}%)"
        share = f"{in_percent(status['attainment'], target=target)} of the last {status['offered']}{wanted}"
        share += JUDGED if any(fared["slo_changed"] for fared in status["classes"].values()) else ""
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
            met = in_percent(fared["attainment"], target=required[name])
            judged = f"{JUDGED}; now {fared['slo']}" if fared["slo_changed"] else f" within {fared['slo']}"
            facts.add_row(Text(name), Text(f"{met} of {fared['offered']}{judged}"))
        for metric in METRICS:
            found, target = fared["latencies_ms"].get(metric), fared["targets_ms"].get(metric)
            if found is not None or (target is not None and fared["offered"]):
                facts.add_row(Text(f"{name} {metric}" if several else metric), _latency(found, target))
    if status["closed"]:
        facts.add_row("engine", Text("closed: its knobs no longer move", style="red"))
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
