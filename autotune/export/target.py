"""What an export target is: one table from our knobs and facts to its keys, each row with how well it fits.

A target is data. Adding one is a module with two tables (see :mod:`autotune.export.vllm`) and a line in
:data:`autotune.export.TARGETS`; everything else, from refusing what would be lost to the comments in the file, is derived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum

from autotune.profile import Profile
from runtime.knobs import Knobs

Value = bool | int | float | str
Written = Mapping[str, Value]


class Fit(StrEnum):
    """How well their setting says what ours says."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class Source:
    """What is exported to ``target``: one setting of a profile, for ``model``. ``model_given``: it was named by the user, and
    need not be the one that was measured; None: the profile is of a shape that nobody has published, and the user names a model
    later.
    """

    target: str
    profile: Profile
    profile_name: str
    purpose: str
    knobs: Knobs
    model: str | None
    model_given: bool

    @property
    def measured_there(self) -> bool:
        """Whether the engine that was measured is the one that it is exported to."""
        return self.profile.engine.name == self.target

    @property
    def max_model_len(self) -> int:
        """Most tokens (prompt + output) of a request that the measured engine accepted: one must fit the KV pool alone."""
        return min(self.profile.model.max_model_len, self.profile.engine.kv_pool.tokens)


def number(value: Value) -> str:
    """A value for people: 5, not 5.0; on, not True."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Ours:
    """A knob or a fact that every target must have a row for. ``value`` reads it."""

    name: str
    unit: str
    doc: str
    value: Callable[[Source], Value]

    def shown(self, source: Source) -> str:
        """``name value unit`` for people."""
        return f"{self.name} {number(self.value(source))} {self.unit}".rstrip()


def ours_of(knobs: type[Knobs]) -> Mapping[str, Ours]:
    """A row for each field of ``Knobs``."""
    return {f.name: _knob(f.name, f.metadata["unit"], f.metadata["doc"]) for f in fields(knobs)}


def _knob(name: str, unit: str, doc: str) -> Ours:
    return Ours(name, unit, doc, lambda source: getattr(source.knobs, name))


KNOB_ROWS = ours_of(Knobs)

FACT_ROWS: Mapping[str, Ours] = {
    fact.name: fact
    for fact in (
        Ours("model", "", "what to serve", lambda s: s.model or "not named"),
        Ours("max_model_len", "tokens", "longest prompt + output of one request", lambda s: s.max_model_len),
        Ours("dtype", "", "the weights' type", lambda s: s.profile.model.dtype),
        Ours("kv_pool", "tokens", "size of the KV cache", lambda s: s.profile.engine.kv_pool.tokens),
        Ours("prefix_cache", "", "share the KV of equal beginnings", lambda s: s.profile.engine.prefix_cache),
        Ours("parallelism", "", "devices that the model is split over", lambda s: s.profile.engine.parallelism),
    )
}
"""What an engine is started with besides the knobs."""


def _nothing(source: Source) -> Written:
    return {}


def _never(source: Source) -> str:
    return ""


def _no(source: Source) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Row:
    """Where one knob or fact goes.

    ``keys``: theirs, all that ``write`` may return; ``write`` converts to their units. ``said``: the difference
    (APPROXIMATE) or the reason (UNSUPPORTED), a clause about the target. ``harmless``: why *this* value loses nothing
    although the row does not fit exactly, or "". ``about``: what to know about the value written, or "". ``exact``: whether it
    fits exactly all the same, of a profile measured on this very engine.
    """

    fit: Fit
    keys: tuple[str, ...] = ()
    write: Callable[[Source], Written] = _nothing
    said: str = ""
    harmless: Callable[[Source], str] = _never
    about: Callable[[Source], str] = _never
    exact: Callable[[Source], bool] = _no

    def __post_init__(self) -> None:
        if (self.fit is Fit.EXACT) == bool(self.said):
            raise ValueError(
                f"a row that is {self.fit} {'needs no' if self.said else 'must say a'} difference or reason"
            )
        if (self.fit is Fit.UNSUPPORTED) == bool(self.keys):
            raise ValueError(f"a row that is {self.fit} {'has no' if self.keys else 'must name its'} keys")


Constraint = Callable[[Written], str]
"""What the target itself refuses: its complaint about the settings, or ""."""


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """An engine to export to.

    ``version``: the one the table was held against. ``filename``: what the file is called unless the user says;
    ``suffixes``: those the engine reads. ``render``: (header lines, entries) → the file's text. ``command``: (model, path)
    → how to start the engine with it.
    """

    name: str
    title: str
    version: str
    filename: str
    suffixes: tuple[str, ...]
    knobs: Mapping[str, Row]
    facts: Mapping[str, Row]
    constraints: tuple[Constraint, ...]
    render: Callable[[list[str], list[Entry]], str]
    command: Callable[[str | None, str], str]

    def rows(self) -> list[tuple[Ours, Row]]:
        """Every row with what it is of, facts about the model first. Raises ``ValueError`` when one is missing or extra."""
        found = []
        for ours, rows, what in ((FACT_ROWS, self.facts, "fact"), (KNOB_ROWS, self.knobs, "knob")):
            if {*ours} != {*rows}:
                odd = ", ".join(sorted({*ours} ^ {*rows}))
                raise ValueError(f"the table of {self.title} and the {what}s differ in {odd}")
            found += [(ours[name], rows[name]) for name in ours]
        return found


@dataclass(frozen=True, slots=True)
class Entry:
    """A row applied to a source. ``note``: what to say of it, "" when it is exact and there is nothing to say."""

    name: str
    value: Value
    source: str
    doc: str
    fit: Fit
    written: Written
    lossy: bool
    note: str
