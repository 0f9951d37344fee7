"""The ``autotune`` command: one file a verb, and one place that turns what went wrong into a line and an exit code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import typer
import typer.core
from pydantic import ValidationError

from autotune.cli import (
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
from autotune.cli.exits import BAD_INPUT, DONE, INTERRUPTED
from autotune.version import __version__
from runtime.errors import InputError, ModelError

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


app = typer.Typer(
    name="autotune",
    cls=Verbs,
    help="Finds and keeps the batching settings of an LLM engine: four knobs, measured on your hardware.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("profile", help=profile.HELP, epilog=profile.EXAMPLES)(profile.profile)
app.command("bench", help=bench.HELP, epilog=bench.EXAMPLES)(bench.bench)
app.command("profiles", help=profiles.HELP, epilog=profiles.EXAMPLES)(profiles.profiles)
app.command("show", help=show.HELP, epilog=show.EXAMPLES)(show.show)
app.command("report", help=report.HELP, epilog=report.EXAMPLES)(report.report)
app.command("check", help=check.HELP, epilog=check.EXAMPLES)(check.check)
app.command("simulate", help=simulate.HELP, epilog=simulate.EXAMPLES)(simulate.simulate)
app.command("capacity", help=capacity.HELP, epilog=capacity.EXAMPLES)(capacity.capacity)
app.command("serve", help=serve.HELP, epilog=serve.EXAMPLES)(serve.serve)
app.command("export", help=export.HELP, epilog=export.EXAMPLES)(export.export)
app.command("watch", help=watch.HELP, epilog=watch.EXAMPLES)(watch.watch)
app.command("pause", help=pause.HELP, epilog=pause.EXAMPLES)(pause.pause)
app.command("resume", help=pause.RESUME_HELP, epilog=pause.RESUME_EXAMPLES)(pause.resume)
app.command("set", help=set_knobs.HELP, epilog=set_knobs.EXAMPLES)(set_knobs.set_knobs)
app.command("explain", help=explain.HELP, epilog=explain.EXAMPLES)(explain.explain)


def _version(asked: bool) -> None:
    if asked:
        print(f"autotune {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Options of the command itself."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 ran and fell short, 2 bad input, 130 stopped by Ctrl-C."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the command. Wrong input is one line on stderr and never a traceback."""
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
    except (KeyboardInterrupt, typer.Abort):
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `autotune show … | head`
        with contextlib.suppress(OSError):
            sys.stderr.close()
        return DONE


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
    whole = "int" in found["type"] or isinstance(getattr(parameter, "min", None), int)
    if not found["type"].startswith(("int", "float", "greater", "less", "finite")):
        return None
    low, high = getattr(parameter, "min", None), getattr(parameter, "max", None)
    bounds = f" of at least {low}" if low is not None else ""
    if high is not None:
        bounds = f" from {low} to {high}" if low is not None else f" of at most {high}"
    name = max(parameter.opts, key=len) if parameter.opts else parameter.name
    return f"{name} is {found['input']}; it must be a {'whole ' if whole else ''}number{bounds}"


def _complain(text: str) -> int:
    """One line, whatever the exception held: a second line would hide the first in a log."""
    print("error: " + " ".join(text.split()), file=sys.stderr)
    return BAD_INPUT


if __name__ == "__main__":
    main()
