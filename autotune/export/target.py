"""What an export target is: tables from our knobs and facts to its keys, each row with how well it fits.

A target is data. Adding one is a module with its tables (see :mod:`autotune.export.vllm`) and a line in
:data:`autotune.export.targets.TARGETS`; everything else, from refusing what would be lost to the comments in the file, is
derived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Generic, TypeVar

from autotune.export.source import ProfiledCallable, ProfiledEngine, Source
from runtime.knobs import KNOBS, Knobs

Value = bool | int | float | str
Written = Mapping[str, Value]
"""Their keys and values. A key with a dot is one of a section: ``kv_cache_config.max_tokens``."""

S = TypeVar("S", bound=Source)
S_contra = TypeVar("S_contra", bound=Source, contravariant=True)


class Fit(StrEnum):
    """How well their setting says what ours says."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    UNSUPPORTED = "unsupported"


def number(value: Value) -> str:
    """A value for people: 5, not 5.0; on, not True."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Ours(Generic[S_contra]):
    """A knob or a fact that every target must have a row for. ``value`` reads it."""

    name: str
    unit: str
    doc: str
    value: Callable[[S_contra], Value]

    def shown(self, source: S_contra) -> str:
        """``name value unit`` for people."""
        return f"{self.name} {number(self.value(source))} {self.unit}".rstrip()


def ours_of(knobs: type[Knobs]) -> Mapping[str, Ours[Source]]:
    """A row for each field of ``Knobs``."""
    return {f.name: _knob(f.name, f.metadata["unit"], f.metadata["doc"]) for f in fields(knobs)}


def _knob(name: str, unit: str, doc: str) -> Ours[Source]:
    return Ours(name, unit, doc, lambda source: getattr(source.knobs, name))


KNOB_ROWS = ours_of(Knobs)

_FACTS: tuple[Ours[ProfiledEngine], ...] = (
    Ours("model", "", "what to serve", lambda s: s.model or "not named"),
    Ours("max_model_len", "tokens", "longest prompt + output of one request", lambda s: s.max_model_len),
    Ours("dtype", "", "the weights' type", lambda s: s.profile.model.dtype),
    Ours(
        "kv_cache_dtype",
        "",
        "what keys and values are kept in; auto: as computed",
        lambda s: s.profile.model.kv_cache_dtype,
    ),
    Ours("kv_pool", "tokens", "size of the KV cache", lambda s: s.profile.engine.kv_pool.tokens),
    Ours("prefix_cache", "", "share the KV of equal beginnings", lambda s: s.profile.engine.prefix_cache),
    Ours("parallelism", "", "devices that the model is split over", lambda s: s.profile.engine.parallelism),
)
FACT_ROWS: Mapping[str, Ours[ProfiledEngine]] = {fact.name: fact for fact in _FACTS}
"""What an engine is started with besides the knobs."""

CALL_ROWS: Mapping[str, Ours[ProfiledCallable]] = {
    "replicas": Ours("replicas", "", "workers that call the function at a time", lambda s: s.profile.replicas),
    "max_batch_size": Ours("max_batch_size", "items", "most items in one call", lambda s: s.knobs.max_batch_size),
    "max_wait_ms": Ours("max_wait_ms", "ms", "longest wait for a call to fill", lambda s: s.knobs.max_wait_ms),
    "token_budget": Ours("token_budget", "", "most cost in one call", lambda s: s.knobs.token_budget),
}
"""What a batcher is given: a row for each of the knobs that mean something to it, and its workers."""
assert {*CALL_ROWS} - {"replicas"} == {spec.name for spec in KNOBS if spec.batcher}


def _nothing(source: Any) -> Written:
    return {}


def _never(source: Any) -> str:
    return ""


def _no(source: Any) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Row(Generic[S_contra]):
    """Where one knob or fact goes.

    ``keys``: theirs, all that ``write`` may return; ``write`` converts to their units. ``said``: the difference
    (APPROXIMATE) or the reason (UNSUPPORTED), a clause about the target. ``harmless``: why *this* value loses nothing
    although the row does not fit exactly, or "". ``about``: what to know about the value written, or "". ``exact``: whether it
    fits exactly all the same, of a profile measured on this very engine. ``unsupported``: why *this* value has no counterpart
    although others have one, or ""; nothing is written of it then. ``differs``: the difference of *this* value where it is not
    what ``said`` says, or "".
    """

    fit: Fit
    keys: tuple[str, ...] = ()
    write: Callable[[S_contra], Written] = _nothing
    said: str = ""
    harmless: Callable[[S_contra], str] = _never
    about: Callable[[S_contra], str] = _never
    exact: Callable[[S_contra], bool] = _no
    unsupported: Callable[[S_contra], str] = _never
    differs: Callable[[S_contra], str] = _never

    def __post_init__(self) -> None:
        if (self.fit is Fit.EXACT) == bool(self.said):
            raise ValueError(
                f"a row that is {self.fit} {'needs no' if self.said else 'must say a'} difference or reason"
            )
        if (self.fit is Fit.UNSUPPORTED) == bool(self.keys):
            raise ValueError(f"a row that is {self.fit} {'has no' if self.keys else 'must name its'} keys")


Constraint = Callable[[Written], str]
"""What the target itself refuses: its complaint about the settings, or ""."""

Rows = list[tuple[Ours[S], Row[S]]]


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """A system to export to.

    ``version``: the one the tables were held against. ``filename``: what the file is called unless the user says;
    ``suffixes``: those it reads. ``knobs`` and ``facts`` are of a language model's profile, ``calls`` of a callable's; None: it
    batches no calls. ``render``: (header lines, entries) → the file's text. ``command``: (model, path) → how to start it.
    ``warning``: what to know before relying on a language model's setting there, beside what its profile says; or "".
    """

    name: str
    title: str
    version: str
    filename: str
    suffixes: tuple[str, ...]
    knobs: Mapping[str, Row[ProfiledEngine]]
    facts: Mapping[str, Row[ProfiledEngine]]
    constraints: tuple[Constraint, ...]
    render: Callable[[list[str], list[Entry]], str]
    command: Callable[[str | None, str], str]
    calls: Mapping[str, Row[ProfiledCallable]] | None = None
    warning: Callable[[ProfiledEngine], str] = _never

    def rows(self) -> Rows[ProfiledEngine]:
        """Every row of a language model's profile with what it is of, facts about the model first.

        Raises ``ValueError`` when one is missing or extra.
        """
        return self._complete(FACT_ROWS, self.facts, "fact") + self._complete(KNOB_ROWS, self.knobs, "knob")

    def call_rows(self) -> Rows[ProfiledCallable]:
        """The same of a callable's profile."""
        return self._complete(CALL_ROWS, self.calls or {}, "call")

    def _complete(self, ours: Mapping[str, Ours[Any]], rows: Mapping[str, Row[S]], what: str) -> Rows[S]:
        if {*ours} != {*rows}:
            odd = ", ".join(sorted({*ours} ^ {*rows}))
            raise ValueError(f"the table of {self.title} and the {what}s differ in {odd}")
        return [(ours[name], rows[name]) for name in ours]


@dataclass(frozen=True, slots=True)
class Entry:
    """A row applied to a source. ``note``: what to say of it, "" when it is exact and there is nothing to say.
    ``refused``: why this value has no counterpart although others have one, or ""."""

    name: str
    value: Value
    source: str
    doc: str
    fit: Fit
    written: Written
    lossy: bool
    note: str
    refused: str
