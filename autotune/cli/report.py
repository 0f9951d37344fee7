"""``autotune report``: a profile, or a run under a controller, as a page for the browser; its essentials on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from autotune.cli.exits import DONE
from autotune.cli.options import AsJson, Price
from runtime.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.report import Evidence, Report

HELP = (
    "Write a profile as one self-contained HTML page of plots, and print the essentials. PROFILE is a YAML file, or the name of "
    "a shipped profile; the file of raw runs beside the profile is used if there is one. LOG is a controller's decision log; the "
    "page then shows that run. "
    "Exit codes: 0 written, 2 PROFILE or LOG cannot be read, or --out cannot be written."
)
EXAMPLES = (
    "Examples:  autotune report cpu-2core-tiny --open  ·  autotune report cpu-2core-tiny --price 2.50/h --out page.html --json"
    "  ·  autotune report run.jsonl --records requests.jsonl"
)


def report(
    profile: Annotated[
        str,
        Argument(
            metavar="PROFILE|LOG",
            help="A profile (a file, or a name from `autotune profiles`), or a decision log.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        Option(
            "--out",
            "-o",
            help="The page to write.  (default: beside the profile or log, named .html; for a shipped profile, in this folder)",
        ),
    ] = None,
    records: Annotated[
        Path | None,
        Option(help="With a decision log: the requests of that run, as written by autotune serve --records."),
    ] = None,
    price: Price = None,
    open_: Annotated[bool, Option("--open", help="Show the page in your browser.")] = False,
    as_json: AsJson = False,
) -> int:
    """Write the page; 2 when the file is neither a valid profile nor a log."""
    from autotune.cli.display import make_console
    from autotune.cost.price import parse_price
    from autotune.profile import load_profile
    from autotune.report import gather, html
    from autotune.report.files import find, is_decision_log, place
    from autotune.report.terminal import show
    from autotune.writing import write_whole

    money = None if price is None else parse_price(price)
    path = find(profile)
    if is_decision_log(path):
        if price is not None:
            raise InputError(f"--price is {price}; it goes with a profile, and {path} is a decision log")
        return _run(path, records, place(path, out), show_it=open_, as_json=as_json)
    if records is not None:
        raise InputError(f"--records is {records}; it goes with a decision log, and {path} is none")
    loaded = load_profile(path)
    page = place(path, out)
    console = make_console(stderr=as_json)
    if money is not None:
        loaded = loaded.model_copy(update={"price_per_hour": money})
    made = _composed(gather(loaded, path), console)
    write_whole(page, html(made))
    if as_json:
        import json

        print(json.dumps(_essentials(made, page), allow_nan=False))
    else:
        show(made, console)
        console.print(f"\nreport  {page}", highlight=False, markup=False, soft_wrap=True)
    if open_:
        _open(page, console)
    return DONE


def _run(log: Path, records: Path | None, page: Path, *, show_it: bool, as_json: bool) -> int:
    """The same for a run under a controller."""
    import json

    from autotune.cli.display import make_console
    from autotune.control.explain import summarize
    from autotune.report.run import compose, html, read_run
    from autotune.writing import write_whole

    made = compose(read_run(log, records))
    write_whole(page, html(made))
    console = make_console(stderr=as_json)
    if as_json:
        sections = {section.key: {"found": section.title, "absent": section.absent} for section in made.sections}
        data = {"file": str(page), "log": str(log), "title": made.head.title, "sections": sections}
        print(json.dumps(data | {"decisions": len(made.run.decisions), "requests": len(made.run.records)}))
    else:
        console.print(made.head.title, highlight=False, markup=False, soft_wrap=True)
        for line in summarize(made.run.decisions).lines():
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        console.print(f"\nreport  {page}", highlight=False, markup=False, soft_wrap=True)
    if show_it:
        _open(page, console)
    return DONE


def _composed(evidence: Evidence, console: Console) -> Report:
    """The report, under a bar while its simulations run."""
    from rich.progress import BarColumn, Progress, TextColumn

    from autotune.report import compose

    if not console.is_terminal:
        return compose(evidence)
    with Progress(TextColumn("simulating around the choice"), BarColumn(), console=console, transient=True) as bars:
        task = bars.add_task("", total=1.0)
        return compose(evidence, advance=lambda share: bars.update(task, completed=share))


def _essentials(made: Report, page: Path) -> dict[str, Any]:
    evidence, head = made.evidence, made.headline
    chosen, baseline = evidence.recommended, evidence.profile.baseline
    return {
        "file": str(page),
        "profile": evidence.source,
        "title": head.title,
        "status": head.status,
        "slo_met": evidence.profile.slo_met,
        "knobs": chosen.knobs.as_dict(),
        "objective": evidence.profile.objective,
        "stage": chosen.point.stage,
        "goodput": chosen.point.goodput.mean,
        "attainment": chosen.point.attainment,
        "baseline_goodput": None if baseline is None else baseline.goodput.mean,
        "e2e_mean_ms": chosen.point.e2e_mean_ms,
        "baseline_e2e_mean_ms": None if baseline is None else baseline.e2e_mean_ms,
        "sure": head.sure,
        "sections": {section.key: {"found": section.title, "absent": section.absent} for section in made.sections},
        "lacking": list(evidence.lacking),
    }


def _open(page: Path, console: Console) -> None:
    import webbrowser

    address = page.resolve().as_uri()
    if not webbrowser.open(address):
        console.print(f"no browser was found; open {address}", highlight=False, markup=False, soft_wrap=True)
