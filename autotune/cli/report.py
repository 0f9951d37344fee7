"""``autotune report``: a profile, or a run under a controller, as a page for the browser; its essentials on the terminal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from autotune.cli.exits import DONE
from autotune.cli.options import AsJson, Price
from runtime.errors import InputError
from runtime.slo import share_met

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
    from autotune.cli.display import make_console, print_as_is
    from autotune.cost.price import parse_price
    from autotune.profile.document import profile_of
    from autotune.profile.text import parse_yaml
    from autotune.report import gather, html
    from autotune.report.terminal import show
    from autotune.writing import write_whole

    money = None if price is None else parse_price(price)
    path = _find(profile)
    content, of_decisions = _read(path)
    if of_decisions:
        if price is not None:
            raise InputError(f"--price is {price}; it goes with a profile, and {path} is a decision log")
        return _run(path, content, records, page_for(path, out), show_it=open_, as_json=as_json)
    if records is not None:
        raise InputError(f"--records is {records}; it goes with a decision log, and {path} is none")
    loaded = profile_of(parse_yaml(path, content), path)
    page = page_for(path, out)
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
        print_as_is(console, f"\nreport  {page}")
    if open_:
        _open(page, console)
    return DONE


def _find(name: str) -> Path:
    """The file ``name``, or the shipped profile of that name. Raises :class:`InputError`."""
    from autotune.profile import find_profile

    path = find_profile(name)
    if os.path.isdir(path):  # false of a name too long, of which Path.is_dir raises
        raise InputError(f"{name}: is a directory; name a profile, such as {name.rstrip('/')}/tiny-cpu.yaml")
    return path


def _read(path: Path) -> tuple[bytes, bool]:
    """The content of ``path``, and whether its first line is a controller's decision. Reads it once: it may be a pipe. Of what
    is no decision log, only as much as tells that it is too large for a profile. Raises :class:`InputError` if it cannot be
    read."""
    from autotune.profile.text import LARGEST, first_object, is_decision

    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
            of_decisions = is_decision(first_object(content.decode("utf-8", errors="replace")))
            return content + file.read() if of_decisions else content, of_decisions
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


def page_for(profile: Path, out: Path | None) -> Path:
    """``out``, else a file beside the profile, or here for one that is shipped. Raises :class:`InputError`."""
    from autotune.profile import shipped_profiles
    from autotune.report.page import is_page
    from autotune.writing import replaceable, writable

    if out is None:
        here = Path() if profile in shipped_profiles().values() else profile.parent
        out = here / f"{profile.stem}.html"
    elif out.suffix not in (".html", ".htm"):
        raise InputError(f"--out: {out} must end in .html, or no browser shows it")
    writable("--out", out)
    replaceable("--out", out, is_page, "is no report")
    return out


def _run(log: Path, content: bytes, records: Path | None, page: Path, *, show_it: bool, as_json: bool) -> int:
    """The same for a run under a controller."""
    import json

    from autotune.cli.display import make_console, print_as_is
    from autotune.control.decision_log import read_decisions
    from autotune.control.explain import summarize
    from autotune.report.run import compose, html, read_run
    from autotune.writing import write_whole

    made = compose(read_run(log, records, decisions=read_decisions(log, content)))
    write_whole(page, html(made))
    console = make_console(stderr=as_json)
    if as_json:
        sections = {section.key: {"found": section.title, "absent": section.absent} for section in made.sections}
        data = {"file": str(page), "log": str(log), "title": made.head.title, "sections": sections}
        print(json.dumps(data | {"decisions": len(made.run.decisions), "requests": len(made.run.records)}))
    else:
        print_as_is(console, made.head.title)
        for line in summarize(made.run.decisions).lines():
            print_as_is(console, line)
        print_as_is(console, f"\nreport  {page}")
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
        "attainment": share_met(chosen.point),
        "baseline_goodput": None if baseline is None else baseline.goodput.mean,
        "e2e_mean_ms": chosen.point.e2e_mean_ms,
        "baseline_e2e_mean_ms": None if baseline is None else baseline.e2e_mean_ms,
        "sure": head.sure,
        "sections": {section.key: {"found": section.title, "absent": section.absent} for section in made.sections},
        "lacking": list(evidence.lacking),
    }


def _open(page: Path, console: Console) -> None:
    import webbrowser

    from autotune.cli.display import print_as_is

    address = page.resolve().as_uri()
    if not webbrowser.open(address):
        print_as_is(console, f"no browser was found; open {address}")
