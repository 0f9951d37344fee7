"""The decision log: what was changed, from what to what, why, and on what evidence. One JSON object a line."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from runtime.errors import InputError
from runtime.knobs import KNOBS, Knobs

VERSION = 1
_KEPT = 1024  # decisions kept in memory

log = logging.getLogger(__name__)


class Decision(NamedTuple):
    """``at``: seconds on the engine's clock; ``wall``: seconds since 1970 when it was logged, None in replays.

    ``action``: ``set`` (the knobs changed), ``hold`` (the regime changed, the knobs did not), ``observe`` (would have set),
    ``note`` (something to know: a promise that changed, a profile that is wrong), or what an operator did: ``pause``, ``resume``,
    ``kill``, ``attach``, ``detach``. ``epoch``: the setting in force afterwards.
    """

    at: float
    action: str
    regime: str
    old: dict[str, float]
    new: dict[str, float]
    epoch: int
    cause: str
    evidence: Mapping[str, Any]
    wall: float | None = None

    def as_json(self) -> str:
        """One line, the same bytes for the same decision."""
        fields = {"v": VERSION, **self._asdict()}
        if self.wall is None:
            del fields["wall"]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def changes(self) -> list[tuple[str, float, float]]:
        """(knob, old, new) of the knobs that differ."""
        return [(s.name, self.old[s.name], self.new[s.name]) for s in KNOBS if self.old[s.name] != self.new[s.name]]


class DecisionLog:
    """The latest decisions in memory, ``recent`` (newest last), and all of them in a file, if there is one.

    Raises :class:`InputError` for a file that cannot be opened. One that cannot be written later, because the disk is full,
    ends with a line in the program's log: it must not stop an engine.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.recent: deque[Decision] = deque(maxlen=_KEPT)
        self._file = None
        if path is not None:
            try:
                self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  # closed with the log
            except OSError as error:
                raise InputError(f"log: {path} cannot be written: {error.strerror}") from None

    def add(self, decision: Decision) -> None:
        self.recent.append(decision)
        if self._file is not None:
            try:
                self._file.write(decision.as_json() + "\n")
                self._file.flush()
            except OSError as error:
                log.error("the decision log cannot be written and ends here: %s", error)
                self.close()

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def read_decisions(path: str | Path) -> Iterator[Decision]:
    """The decisions of a log file. Raises :class:`InputError` naming the line that cannot be read.

    A last line without a newline is one that was being written when its process died, and is left out.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1], 1):
        if line.strip():
            yield _decision(line, f"{path}: line {number}")


_KINDS: dict[str, tuple[type, ...]] = {
    "at": (int, float),
    "wall": (int, float, type(None)),
    "epoch": (int,),
    "action": (str,),
    "regime": (str,),
    "cause": (str,),
    "evidence": (dict,),
}
_BEFORE = Knobs()  # what a knob was at before it was one

_KIND_NAMES: dict[tuple[type, ...], str] = {
    (int, float): "a finite number",
    (int, float, type(None)): "a finite number or null",
    (int,): "a whole number",
    (str,): "text",
    (dict,): "an object",
}


def _decision(line: str, where: str) -> Decision:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"{where} is not JSON; is it a decision log?") from None
    if not isinstance(fields, dict):
        raise InputError(f"{where} is not a decision; is it a decision log?")
    if fields.pop("v", None) != VERSION:
        raise InputError(f"{where} has no version {VERSION} decision; this autotune reads version {VERSION}")
    missing = [name for name in Decision._fields if name != "wall" and name not in fields]
    unknown = [name for name in fields if name not in Decision._fields]
    if missing or unknown:
        raise InputError(f"{where}: {'missing' if missing else 'unknown'} field {(missing or unknown)[0]}")
    for name, kinds in _KINDS.items():
        value = fields.get(name)
        if (
            not isinstance(value, kinds)
            or isinstance(value, bool)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            raise InputError(f"{where}: {name} is {value!r:.40}; it must be {_KIND_NAMES[kinds]}")
    for name in ("old", "new"):
        try:
            Knobs.from_mapping(fields[name], where=f"{name}.")
        except (ValueError, AttributeError) as error:
            raise InputError(f"{where}: {error}") from None
        absent = [s.name for s in KNOBS if s.required and s.name not in fields[name]]
        if absent:
            raise InputError(f"{where}: {name}.{absent[0]} is missing")
        fields[name] = {s.name: fields[name].get(s.name, getattr(_BEFORE, s.name)) for s in KNOBS}
    return Decision(**fields)


SHORT = {spec.name: spec.short for spec in KNOBS} | {"max_wait_ms": "wait_ms", "token_budget": "token_budget"}


def describe(decision: Decision) -> tuple[str, str]:
    """(what happened, why) of a decision, for a person."""
    what = "  ".join(f"{SHORT[name]} {old:.10g} → {new:.10g}" for name, old, new in decision.changes)
    if decision.action == "observe":
        what = f"(would set) {what}"
    elif decision.action != "set" or not what:
        what = f"{decision.action}  {what}".rstrip()
    return what, f"{decision.cause} [{decision.regime}]" if decision.regime else decision.cause
