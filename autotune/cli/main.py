"""The ``autotune`` command: one file a verb, and one place that turns what went wrong into a line and an exit code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

import typer
import typer.core
from pydantic import ValidationError

from autotune.cli import (
    advise,
    bench,
    capacity,
    check,
    explain,
    export,
    pause,
    profile,
    profiles,
    report,
    serve,
    set_knobs,
    show,
    simulate,
    watch,
)
from autotune.cli.exits import BAD_INPUT, DONE, FELL_SHORT, INTERRUPTED
from autotune.cli.output import guarded
from runtime.errors import AutotuneError, InputError, ModelError
from runtime.version import __version__

# Typer has its own copy of click in some versions and imports click in others; the bases of its public error fit both.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
ClickException: type[Exception] = typer.BadParameter.__mro__[2]


class Verbs(typer.core.TyperGroup):
    """The verbs; Ctrl-C in one that does not handle it itself is an Abort, which typer otherwise makes a silent exit."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


class Verb(typer.core.TyperCommand):
    """One of them. What is given to it as empty text, as by a shell variable that is not set, would stand for the default."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for before, word in pairwise(["", *takewhile(lambda word: word != "--", args)]):
            if word == "" or (word.startswith("--") and word.endswith("=")):
                which = word.rstrip("=") or (before if before.startswith("-") and "=" not in before else "an argument")
                raise InputError(f"{which} is empty; give it a value, or leave it out")
        try:
            parsed: list[str] = super().parse_args(ctx, args)
        except UsageError as error:
            error.ctx = getattr(error, "ctx", None) or ctx  # type: ignore[attr-defined]  # an option without its value has none
            raise
        return parsed


app = typer.Typer(
    name="autotune",
    cls=Verbs,
    help="Find batching settings for an LLM engine on your hardware, and tune them live.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_FIND, _ASK, _LIVE = "Find settings", "Simulate and compare", "Serve and control"
for _panel, _name, _command, _help, _examples, _short in (
    (
        _FIND,
        "profile",
        profile.profile,
        profile.HELP,
        profile.EXAMPLES,
        "Measure this machine and find the best settings.",
    ),
    (_FIND, "check", check.check, check.HELP, check.EXAMPLES, "Check that a profile still fits this machine."),
    (_FIND, "profiles", profiles.profiles, profiles.HELP, profiles.EXAMPLES, "List the profiles in this package."),
    (_FIND, "show", show.show, show.HELP, show.EXAMPLES, "Print a profile as a table."),
    (
        _FIND,
        "report",
        report.report,
        report.HELP,
        report.EXAMPLES,
        "Write a profile, or a controller's run, as an HTML page.",
    ),
    (
        _FIND,
        "export",
        export.export,
        export.HELP,
        export.EXAMPLES,
        "Write a setting as a configuration of vLLM and others.",
    ),
    (_ASK, "simulate", simulate.simulate, simulate.HELP, simulate.EXAMPLES, "Simulate settings under another load."),
    (
        _ASK,
        "capacity",
        capacity.capacity,
        capacity.HELP,
        capacity.EXAMPLES,
        "Find the highest rate that meets an SLO, by simulation.",
    ),
    (_ASK, "advise", advise.advise, advise.HELP, advise.EXAMPLES, "Suggest settings for a running vLLM server."),
    (_ASK, "bench", bench.bench, bench.HELP, bench.EXAMPLES, "Compare a controller, defaults and settings, live."),
    (_LIVE, "serve", serve.serve, serve.HELP, serve.EXAMPLES, "Serve a model over HTTP; with --slo, tune the knobs."),
    (_LIVE, "watch", watch.watch, watch.HELP, watch.EXAMPLES, "Watch a live controller."),
    (_LIVE, "pause", pause.pause, pause.HELP, pause.EXAMPLES, "Pause a live controller."),
    (_LIVE, "resume", pause.resume, pause.RESUME_HELP, pause.RESUME_EXAMPLES, "Resume a paused controller."),
    (_LIVE, "set", set_knobs.set_knobs, set_knobs.HELP, set_knobs.EXAMPLES, "Set knobs of a live engine by hand."),
    (_LIVE, "explain", explain.explain, explain.HELP, explain.EXAMPLES, "Show what a controller did, and why."),
):
    app.command(_name, cls=Verb, help=_help, short_help=_short, epilog=_examples, rich_help_panel=_panel)(_command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"autotune {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options of the command itself."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 ran and fell short, 2 bad input, 130 stopped by Ctrl-C."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the command. Wrong input is one line on stderr and never a traceback, and so is a stdout that cannot be
    written; one whose reader has gone, as after ``| head``, changes nothing."""
    try:
        with guarded():
            return _run(arguments)
    except InputError as error:
        return _complain(str(error))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        result = app(args=given, prog_name="autotune", standalone_mode=False, obj=given)
        return result if isinstance(result, int) else DONE
    except (InputError, ModelError) as error:
        return _complain(str(error))
    except MemoryError:
        return _complain(
            "that takes more memory than there is; ask for less (fewer requests, a smaller KV pool or model)"
        )
    except typer.Exit as error:
        return error.exit_code
    except UsageError as error:
        return _complain(_usage(error))
    except ClickException as error:
        return _complain(str(getattr(error, "message", error)))
    except AutotuneError as error:
        if (said := _why_short(error)) is not None:
            return _complain(said, FELL_SHORT)
        return _stopped()
    except (KeyboardInterrupt, typer.Abort):
        return _stopped()


def _stopped() -> int:
    with contextlib.suppress(OSError):
        print("stopped", file=sys.stderr)
    return INTERRUPTED


def _why_short(error: AutotuneError) -> str | None:
    """What a command ended for that had begun; None if somebody stopped it."""
    from autotune.measure.evaluate import EvaluationError, Interrupted

    if isinstance(error, Interrupted):
        return None
    return f"nothing could be measured: {error}" if isinstance(error, EvaluationError) else str(error)


def _usage(error: Any) -> str:
    wrong = _wrong_value(error)
    if wrong is not None:
        return wrong
    text = str(error.format_message()).rstrip(".")
    if not text:  # no verb was given, and the help has been printed
        return "name a command"
    context = error.ctx
    verb = f" {context.info_name}" if context is not None and context.parent is not None else ""
    return f"{text[:1].lower()}{text[1:]}; see autotune{verb} --help"


def _wrong_value(error: Any) -> str | None:
    """``--seed is -1; it must be …`` for a number that an option cannot take; None for any other mistake."""
    parameter, cause = getattr(error, "param", None), error.__cause__
    if parameter is None or not isinstance(cause, ValidationError):
        return None
    found = cause.errors()[0]
    if not found["type"].startswith(("int", "float", "greater", "less", "finite")):
        return None
    whole = found["type"].startswith("int") or any(isinstance(bound, int) for bound in found.get("ctx", {}).values())
    low, high = getattr(parameter, "min", None), getattr(parameter, "max", None)
    bounds = f" of at least {low}" if low is not None else ""
    if high is not None:
        bounds = f" from {low} to {high}" if low is not None else f" of at most {high}"
    name = max(parameter.opts, key=len) if parameter.opts else parameter.name
    return f"{name} is {found['input']}; it must be a {'whole ' if whole else ''}number{bounds}"


def _complain(text: str, code: int = BAD_INPUT) -> int:
    """One line, whatever the exception held: a second line would hide the first in a log. Returns ``code``."""
    with contextlib.suppress(OSError):  # nobody reads stderr: the exit code still says it
        print("error: " + " ".join(text.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
