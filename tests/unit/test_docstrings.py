"""What ``help()`` says of the public names: each parameter stands in a docstring, as code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum
from importlib import import_module
from typing import Any

import pytest

ROOMS = ("autotune", "runtime")
MADE_ELSEWHERE = {
    "Control": "autotune.control makes it, and documents what it is made of",
    "Stream": "Engine.submit makes it",
    "Profile": "a file's fields: docs/reference/profile-fields.md has each, from the schema",
    "CallableProfile": "a file's fields: the schema has each",
    "Knobs": "each field has unit, bounds and meaning beside it, in its KnobSpec",
    "KnobLimits": "its fields are those of Knobs",
}
"""Classes whose constructor's parameters are documented elsewhere, and where."""
PUBLIC = [f"{room}.{name}" for room in ROOMS for name in import_module(room).__all__ if not name.startswith("__")]


def named(docstring: str | None) -> set[str]:
    """The words that stand in ``docstring`` as code."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"``(.+?)``", docstring or "", re.DOTALL))))


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of what ``function`` takes, but for ``self`` and what is private."""
    names = inspect.signature(function).parameters
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ROOMS


def methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods of ``kind`` that are written in this repository, inherited ones too."""
    for name in dir(kind):
        owner = next(one for one in kind.__mro__ if name in vars(one)) if not name.startswith("_") else object
        found = inspect.unwrap(getattr(owner, name)) if ours(owner) else None
        found = getattr(found, "__func__", found)  # of a class method
        if inspect.isfunction(found):
            yield name, found


def takes_its_own(kind: type) -> bool:
    """Whether ``kind`` says itself what it is made of; an exception mostly takes a message and no more."""
    return not issubclass(kind, BaseException) or inspect.isfunction(kind.__init__)


def undocumented(public: Any) -> dict[str, list[str]]:
    """Where parameters are missing, and which: in the docstring of a function, a class (its constructor's) or a method."""
    found = {}
    if inspect.isclass(public):
        for name, method in methods(public):
            missing = [one for one in parameters(method) if one not in named(method.__doc__)]
            if missing or not method.__doc__:
                found[f"{public.__name__}.{name}"] = missing
        made = not issubclass(public, Enum) and not getattr(public, "_is_protocol", False)
        if not made or public.__name__ in MADE_ELSEWHERE or not takes_its_own(public):
            return found
    missing = [one for one in parameters(public) if one not in named(public.__doc__)]
    if missing or not public.__doc__:
        found[public.__name__] = missing
    return found


@pytest.mark.parametrize("name", PUBLIC)
def test_every_parameter_of_a_public_name_is_documented(name: str) -> None:
    module, _, public = name.rpartition(".")
    assert undocumented(getattr(import_module(module), public)) == {}


def test_each_exception_is_one() -> None:
    public = {name.rpartition(".")[2]: name for name in PUBLIC}
    for name in MADE_ELSEWHERE:
        module = public[name].rpartition(".")[0]
        made = getattr(import_module(module), name)
        assert set(parameters(made)) - named(made.__doc__), f"{name} documents all its parameters; take it off the list"


def test_what_is_missing_is_found() -> None:
    class Shelf:
        """Holds ``boxes``."""

        def __init__(self, boxes: int, doors: int) -> None: ...

        def open(self, door: int, *, slowly: bool = False) -> None:
            """Open ``door`` slowly."""

        def shut(self) -> None: ...

        def _hidden(self, door: int) -> None: ...

    Shelf.__module__ = "runtime.shelf"
    assert undocumented(Shelf) == {"Shelf": ["doors"], "Shelf.open": ["slowly"], "Shelf.shut": []}

    def lend(box: int) -> None:
        """Lend a box."""

    assert undocumented(lend) == {"lend": ["box"]}
