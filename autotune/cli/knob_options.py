"""An option for every knob, made from the knobs themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

from typer import Option

from runtime.errors import InputError
from runtime.knobs import KNOBS


def with_knobs(command: Callable[..., int]) -> Callable[..., int]:
    """``command`` with an option for every knob in place of its argument ``knobs``, a dict of those that were given."""

    def run(**arguments: Any) -> int:
        given = {spec.name: value for spec in KNOBS if (value := arguments.pop(spec.name)) is not None}
        return command(knobs=given, **arguments)

    hints = get_type_hints(command, include_extras=True)
    options = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name != "knobs":
            options.append(parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY))
            continue
        for spec in KNOBS:
            kind = int if spec.integer else float
            option = Option(f"--{spec.name.replace('_', '-')}", help=f"Knob, in {spec.unit}: {spec.doc}.")
            options.append(
                inspect.Parameter(
                    spec.name, parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
                )
            )
    run.__signature__ = inspect.Signature(options, return_annotation=int)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {option.name: option.annotation for option in options} | {"return": int}
    run.__doc__ = command.__doc__
    return run


def checked_knobs(given: Mapping[str, float]) -> dict[str, float]:
    """``given``, within the knobs' own bounds. Raises :class:`InputError` that names the option."""
    for spec in KNOBS:
        if spec.name in given:
            try:
                spec.check(given[spec.name])
            except ValueError as error:
                raise InputError(f"--{str(error).replace(spec.name, spec.name.replace('_', '-'), 1)}") from None
    return dict(given)
