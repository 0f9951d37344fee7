"""The controllers by name. ``@register`` adds one, and the contract suite then runs over it.

A controller in one file: a class with the methods of :class:`~autotune.control.controllers.protocol.Controller`, a ``name``, and
``@register`` above it, in any module of this package. One that lives elsewhere needs no registration: ``module:Class`` names it.

What a class needs to know it takes by name in its ``__init__``: ``slo`` (the SLO of class ``default``), ``start`` (the knobs to
begin with and to fall back on), ``kv_tokens`` and ``block_size`` (of the KV pool), ``model`` (a
:class:`~runtime.step_model.StepLearner` that knows which decode steps the engine records, and the hardware where a profile does,
or None), ``tile`` (tokens: steps are best of whole ones; 1: of any number).
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

from autotune.control.controllers.protocol import METHODS, Controller, check_controller, failure
from runtime.knobs import Knobs
from runtime.slo import SLO
from runtime.step_model import StepLearner
from runtime.tunable import TILE

C = TypeVar("C", bound=type[Controller])
TAKES: Final = ("slo", "start", "kv_tokens", "block_size", "model", "tile")

Make = Callable[..., Controller]
"""Makes a controller of :data:`TAKES`, in that order; ``model`` and ``tile`` may be left out."""

CONTROLLERS: Final[dict[str, Make]] = {}
"""Name → what makes one, for engines."""

OF_BATCHERS: Final[dict[str, Make]] = {}
"""Those that know what a call of a batcher is, and no more."""


def register(made: C) -> C:
    """Add the class ``made`` under its ``name``."""
    return _register(made, CONTROLLERS)


def register_for_batchers(made: C) -> C:
    """Add the class ``made``, which is of use to batchers alone, under its ``name``."""
    return _register(made, OF_BATCHERS)


def find(name: str, *, batcher: bool = False) -> Make:
    """What makes the controller called ``name``, for an engine or a batcher: one that is registered, or ``module:Class``.

    The module is searched for in the working directory too. Raises ``ValueError`` for a name that is not known, or a class
    that cannot be imported or is no controller.
    """
    there = CONTROLLERS | OF_BATCHERS if batcher else CONTROLLERS
    if name in there:
        return there[name]
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute) or module.endswith(".py"):
        known = ", ".join(there)
        raise ValueError(f"controller is {name!r}; it must be one of {known}, {_meant(name)}, or a Controller")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise ValueError(f"controller is {name}; it cannot be imported: {type(error).__name__}: {error}") from error
    return maker(made, name)


def maker(made: Callable[..., Controller], name: str) -> Make:
    """What makes ``made`` of those of :data:`TAKES` that it takes. Raises ``ValueError`` if it needs others."""
    if not callable(made):
        raise ValueError(f"controller is {name}; it must be a class, not a {type(made).__name__}")
    parameters = inspect.signature(made).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if unknown := [p for p in needed if p not in TAKES]:
        raise ValueError(f"controller is {name}; it needs {unknown[0]}, but a controller is given {', '.join(TAKES)}")
    if inspect.isclass(made) and (missing := [part for part in METHODS if not hasattr(made, part)]):
        raise ValueError(f"controller is {name}; it lacks {', '.join(missing)}, which a Controller has")
    takes = [p.name for p in parameters if p.name in TAKES]

    def make(
        slo: SLO,
        start: Knobs,
        kv_tokens: int,
        block_size: int,
        model: StepLearner | None = None,
        tile: int = TILE,
    ) -> Controller:
        given: dict[str, Any] = dict(zip(TAKES, (slo, start, kv_tokens, block_size, model, tile), strict=True))
        try:
            controller = made(**{parameter: given[parameter] for parameter in takes})
        except (Exception, SystemExit) as error:
            raise ValueError(f"controller is {name}; {failure(made, error)}") from error
        check_controller(controller)
        return controller

    make.__module__ = made.__module__  # whose docstring says what it does
    return make


def _meant(name: str) -> str:
    """How ``name``, which may be a file, is written: ``module:Class``, with the names of the controllers in that file."""
    before, _, attribute = name.partition(":")
    given = Path(before.removesuffix(".py"))
    if given.name:
        for file, wanted in ((f"{given}.py", attribute), (given.with_suffix(".py"), given.suffix[1:])):
            if os.path.isfile(file):
                meant = [wanted] if wanted else _classes(file) or ["MyController"]
                folder = "" if given.parent == Path() else f", in the folder {given.parent}"
                return f"module:Class ({', '.join(f'{Path(file).stem}:{one}' for one in meant)}{folder})"
    return "module:Class (mine:MyController for the class MyController in mine.py)"


def _classes(file: str | Path) -> list[str]:
    """The classes in ``file`` that decide."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [c.name for c in classes if any(isinstance(m, ast.FunctionDef) and m.name == "decide" for m in c.body)]


def _register(made: C, where: dict[str, Make]) -> C:
    name = made.name
    if not isinstance(name, str) or ":" in name or name in CONTROLLERS or name in OF_BATCHERS:
        raise ValueError(f"{made.__qualname__}.name is {name!r}; it must be text without a colon that no other has")
    where[name] = maker(made, name)
    return made
