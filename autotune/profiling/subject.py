"""What is profiled: a function named ``package.module:function``, the inputs of a JSONL file, and what each input costs."""

from __future__ import annotations

import builtins
import contextlib
import copy
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from autotune.engines import undecorated
from runtime.batching.groupings import Grouping, grouping_of
from runtime.batching.invoke import kind_of
from runtime.batching.options import whole_cost
from runtime.errors import InputError

MOST_BYTES = 2**30


@dataclass(frozen=True)
class Subject:
    """``function`` by its ``name``; ``costs``: one for each of ``inputs``, by the function ``cost_name`` (None: 1 each).

    ``collate`` and ``grouping`` are what ``@batch`` was given, if it stands over the function."""

    name: str
    function: Callable[..., Any]
    inputs: Sequence[Any]
    inputs_name: str
    costs: Sequence[int]
    cost_name: str | None
    cost: Callable[[Any], float] | None
    collate: Callable[[list[Any]], Any] | None = None
    grouping: str | Grouping = "arrival"

    def cost_of(self, indices: Sequence[int]) -> int:
        """Of a call with these inputs, as its grouping counts it."""
        costs = [self.costs[i] for i in indices]
        return len(costs) * max(costs) if grouping_of(self.grouping).padded else sum(costs)

    def new_grouping(self) -> str | Grouping:
        """One that holds nothing yet."""
        return copy.deepcopy(self.grouping)

    @property
    def sources(self) -> list[Path]:
        """The files of the function: of the module it was named in, and that in which it is written."""
        module = sys.modules.get(self.name.partition(":")[0])
        found = [getattr(module, "__file__", None)]
        with contextlib.suppress(TypeError):  # built in, or an object
            found.append(inspect.getsourcefile(self.function))
        return [Path(name) for name in dict.fromkeys(found) if name]

    @property
    def mean_cost(self) -> float:
        return sum(self.costs) / len(self.costs)

    @property
    def costs_vary(self) -> bool:
        return min(self.costs) != max(self.costs)


def load_subject(callable_name: str, inputs: Path, cost: str | None) -> Subject:
    """Import and read everything. Raises :class:`InputError`, one line that names the option."""
    function, options = undecorated(
        _function("--callable", callable_name)
    )  # its own batcher is not what is asked about
    if kind_of(function)[0]:
        raise InputError(
            f"--callable: {callable_name} is a generator; a function that returns one list can be profiled"
        )
    items = read_inputs(inputs)
    measure = options.get("cost") if cost is None else cost_function(cost)
    if cost is None and measure is not None:
        cost = _name_of(measure)
    return Subject(
        callable_name,
        function,
        items,
        inputs.name,
        costs_of(items, measure, cost or "", inputs),
        cost,
        measure,
        options.get("collate"),
        options.get("grouping", "arrival"),
    )


def cost_function(name: str) -> Callable[[Any], float]:
    """``len`` and other builtins by their name, anything else as ``package.module:function``."""
    if ":" in name:
        return cast(Callable[[Any], float], _function("--cost", name))
    found = getattr(builtins, name, None)
    if not callable(found):
        raise InputError(f"--cost: {name!r} is neither a builtin function such as len nor package.module:function")
    return cast(Callable[[Any], float], found)


def _name_of(cost: Callable[[Any], float]) -> str:
    """As ``--cost`` would be given it: the profile tells by it which costs its knobs are for."""
    module, name = getattr(cost, "__module__", None), getattr(cost, "__qualname__", None)
    if not module or not name or "<" in name:
        raise InputError(
            f"--cost: @batch was given {cost!r}, which has no name of its own; give --cost package.module:function"
        )
    return name if module == "builtins" else f"{module}:{name}"


def costs_of(
    items: Sequence[Any], cost: Callable[[Any], float] | None, name: str, source: Path = Path("inputs")
) -> list[int]:
    """The cost of each item, 1 without a cost function."""
    if cost is None:
        return [1] * len(items)
    found = []
    for number, item in enumerate(items, 1):
        try:
            found.append(whole_cost(cost(item)))
        except (Exception, SystemExit) as error:
            raise InputError(f"--cost: {name} failed on input {number} of {source}: {_described(error)}") from None
    return found


def read_inputs(path: Path) -> list[Any]:
    """One JSON value a line; empty lines are skipped."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"--inputs: {path} is larger than {MOST_BYTES // 2**20} MiB; a sample of it will do")
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise InputError(f"--inputs: {path} is not a text file in UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"--inputs: {path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    items = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            items.append(json.loads(line))
        except (ValueError, RecursionError) as error:  # ValueError: an integer of thousands of digits
            why = getattr(error, "msg", None) or ("nested too deep" if isinstance(error, RecursionError) else error)
            raise InputError(f"--inputs: {path}: line {number} is not JSON ({why}); write one value a line") from None
    if not items:
        raise InputError(f"--inputs: {path} holds no inputs; write one JSON value a line")
    return items


def _function(option: str, name: str) -> Any:
    """What ``package.module:name`` means, seen from the working directory as ``python -m`` would."""
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path) or not all(part.isidentifier() for part in module_name.split(".")):
        raise InputError(f"{option} is {name!r}; write package.module:function")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise InputError(f"{option}: there is no module {missing}, from {os.getcwd()} or installed") from None
        raise InputError(f"{option}: {module_name} needs a module that is not there: {missing}") from None
    except (Exception, SystemExit) as error:
        raise InputError(f"{option}: importing {module_name} failed: {_described(error)}") from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise InputError(f"{option}: {module_name} has no {path}")
        found = getattr(found, part)
    if not callable(found):
        takes = "one input" if option == "--cost" else "a list of items"
        raise InputError(f"{option}: {name} is {type(found).__name__}, not callable; it must take {takes}")
    return found


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
