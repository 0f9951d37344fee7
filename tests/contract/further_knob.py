"""A pytest plugin that puts a further knob where a real one would be: into the text of ``runtime/knobs.py``, before anything
imports it. Nothing else is told of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

NAME = "max_prompts"
USUAL, CEILING = 65536, 65536  # as if there were no such knob

FIELD = f"""
    {NAME}: int = _knob(
        {USUAL}, unit="sequences", low=1, high=65536, log=True, integer=True, doc="most prompts that begin in one step",
        short="new", usual=(1, 64),
    )

    def __post_init__("""
LAST = "    draft_tokens: int = 16\n"
LIMIT = f"{LAST}    {NAME}: int = {CEILING}\n"


def with_a_further_knob(source: str) -> str:
    """``runtime/knobs.py`` with one field more in each of its classes."""
    knobs, begin, rest = source.partition("\n    def __post_init__(")
    made = knobs + FIELD + rest.replace(LAST, LIMIT, 1)
    assert begin and made.count(NAME) == 2, "runtime/knobs.py looks otherwise than this was written for"
    return made


path = Path(__file__).parents[2] / "runtime" / "knobs.py"
assert "runtime.knobs" not in sys.modules, "too late: somebody has imported the knobs there are"
module = ModuleType("runtime.knobs")
module.__file__ = str(path)
sys.modules["runtime.knobs"] = module
exec(compile(with_a_further_knob(path.read_text(encoding="utf-8")), str(path), "exec"), module.__dict__)
