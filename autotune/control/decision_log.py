"""The decision log: what was changed, from what to what, why, and on what evidence. One JSON object a line."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from runtime.errors import InputError
from runtime.knobs import KNOBS, Knobs
from runtime.shared.json_lines import drop_cut_line, holds_something_else, lock, unlock, whole_lines
from runtime.slo import SLO

VERSION = 1
_IN_MEMORY = 1024  # decisions
_MOST = 1e300  # of a number in a file
_JOIN_TIMEOUT_S = 5.0  # for a writer to write what is left

log = logging.getLogger(__name__)

_BEFORE = Knobs()  # what a knob was at before it was one


class Decision(NamedTuple):
    """``at``: seconds on the engine's clock; ``wall``: seconds since 1970 when it was logged, None in replays.

    ``action``: ``set`` (the knobs changed), ``hold`` (the regime changed, the knobs did not), ``observe`` (would have set),
    ``note`` (something to know: an SLO that changed, a profile that does not fit), or what an operator did: ``pause``,
    ``resume``, ``kill``, ``attach``, ``detach``. ``epoch``: the setting in force afterwards.
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
        fields = {"v": VERSION, **self._asdict(), "old": _written(self.old), "new": _written(self.new)}
        if self.wall is None:
            del fields["wall"]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Decision:
        """From the object that :meth:`as_json` writes. A knob that it does not name is at its default."""
        read = {name: value for name, value in fields.items() if name != "v"}
        return cls(**read | {name: _BEFORE.as_dict() | read[name] for name in ("old", "new")})

    @property
    def changes(self) -> list[tuple[str, float, float]]:
        """(knob, old, new) of the knobs that differ."""
        return [(s.name, self.old[s.name], self.new[s.name]) for s in KNOBS if self.old[s.name] != self.new[s.name]]

    @property
    def local_time(self) -> datetime | None:
        """``wall`` as a date and time of the reader's; None where there is none, or it is no time that a calendar has."""
        try:
            return None if self.wall is None else datetime.fromtimestamp(self.wall)
        except (OverflowError, OSError, ValueError):
            return None


def _written(values: Mapping[str, float]) -> dict[str, float]:
    """``values`` without knobs that came later and are at their default: as lines from before have them."""
    return {spec.name: values[spec.name] for spec in Knobs.from_mapping(values).shown}


_OPEN: weakref.WeakSet[DecisionLog] = weakref.WeakSet()
"""Those of this process that write a file, each held by its writer alone once nobody else has it."""


@atexit.register
def _join_all() -> None:
    for one in [*_OPEN]:
        one.join()


class DecisionLog:
    """The latest decisions in memory, ``recent`` (newest last), and all of them in a file, if there is one.

    A thread of its own writes the file, so that a slow disk or a pipe that nobody reads does not hold up the engine: :meth:`add`
    puts a decision into a queue of ``queue_size`` and returns. What a full queue cannot take is counted in ``dropped``, and
    reported in the program's log and, where it is missing, in the file. So is, in the program's log, what is no JSON.
    :meth:`close` ends the file without waiting.
    :meth:`join` waits until all is written, as does the end of the program.

    ``over``: whether no more will come, because the engine is closed, say; then the next log takes the file over.

    Raises :class:`InputError` for a file that cannot be opened, and for one that another controller writes. One that cannot be
    written later, because the disk is full, ends with a line in the program's log, and ``failure`` is why: it must not stop an
    engine.
    """

    def __init__(
        self, path: str | Path | None, *, queue_size: int = 4096, over: Callable[[], bool] = lambda: False
    ) -> None:
        self._over = over
        self.failure: OSError | None = None
        self.recent: deque[Decision] = deque(maxlen=_IN_MEMORY)
        self._late = 0  # that a full queue did not take,
        self._unreported = 0  # of those,
        self._no_json = 0  # and those that cannot be written
        self._queue: queue.Queue[Decision | None] = queue.Queue(queue_size)
        self._closing = threading.Event()
        self._writer: threading.Thread | None = None
        if path is not None:
            for other in [*_OPEN]:
                if other._over():
                    other.join()
            file = open_to_append(path)
            self._writer = threading.Thread(target=self._write, args=(path, file), name="decision log", daemon=True)
            self._writer.start()
            _OPEN.add(self)

    @property
    def dropped(self) -> int:
        """Decisions that are not in the file."""
        return self._late + self._no_json

    def add(self, decision: Decision) -> None:
        """Never waits."""
        self.recent.append(decision)
        writer = self._writer
        if writer is None or self._closing.is_set() or not writer.is_alive():
            return
        try:
            if self._unreported:
                missing = f"{self._unreported} decisions are missing here: the log was written too slowly"
                self._queue.put_nowait(
                    decision._replace(
                        action="note",
                        old=decision.old,
                        new=decision.old,
                        cause=missing,
                        evidence={"dropped": self._unreported},
                    )
                )
                self._unreported = 0
            self._queue.put_nowait(decision)
        except queue.Full:
            self._late += 1
            self._unreported += 1
            if self._late == 1:
                log.warning(
                    "the decision log is written too slowly: decisions are dropped from it while its queue is full"
                )

    def close(self) -> None:
        """Add no more to the file; what has been added is still written. Does not wait. Any number of times."""
        self._closing.set()
        with contextlib.suppress(queue.Full):  # else the writer sees for itself that it is closing
            self._queue.put_nowait(None)

    def join(self) -> None:
        """Close, and wait until all is written, five seconds at most; what is not by then is reported as lost."""
        self.close()
        writer, self._writer = self._writer, None
        if writer is None:
            return
        _OPEN.discard(self)
        writer.join(_JOIN_TIMEOUT_S)
        lost = self._late + (self._unwritten() if writer.is_alive() else 0)
        if lost:
            log.warning("%d decisions are not in the decision log: it was written too slowly", lost)

    def _unwritten(self) -> int:
        with self._queue.mutex:
            return sum(decision is not None for decision in self._queue.queue)

    def _write(self, path: str | Path, file: TextIO | None) -> None:
        """On the writer's thread."""
        try:
            with file or open(path, "a", encoding="utf-8") as out:  # a pipe opens when somebody reads it
                while (decision := self._next()) is not None:
                    out.write(self._line(decision))
                    if self._queue.empty():
                        out.flush()
                out.flush()
                unlock(out)
        except OSError as error:
            self.failure = error
            log.error("the decision log cannot be written and ends here: %s", error)

    def _line(self, decision: Decision) -> str:
        """``decision`` as a line; empty, and reported, where somebody's own controller put in what is no JSON."""
        try:
            return decision.as_json() + "\n"
        except (TypeError, ValueError, RecursionError) as error:
            self._no_json += 1
            log.error("a decision at %g s is not in the decision log, for it is no JSON: %s", decision.at, error)
            return ""

    def _next(self) -> Decision | None:
        """The next to write; None when all is written and no more will come."""
        while True:
            try:
                decision = self._queue.get(timeout=None if not self._closing.is_set() else 0)
            except queue.Empty:
                return None
            if decision is not None:
                return decision


def open_to_append(path: str | Path) -> TextIO | None:
    """The file at ``path``, locked until it is closed; None for a pipe, which can only be opened once somebody reads it.

    Raises :class:`InputError` for a file that cannot be written, that holds something else than decisions, or that another
    controller writes: of two logs in one file nobody could tell which knobs were whose.
    """
    try:
        if Path(path).is_fifo():
            return None
        if holds_something_else(path, "action", "cause"):
            raise InputError(f"log: {path} exists and is no decision log; name another file")
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(open(path, "a", encoding="utf-8"))
            if not lock(file):  # one that has just been detached still holds it while it writes what is left
                raise InputError(
                    f"log: a controller that has not been closed writes its decisions to {path}; name another file"
                )
            drop_cut_line(path)
            opened.pop_all()  # it stays open
        return file
    except OSError as error:
        raise InputError(f"log: {path} cannot be written: {error.strerror}") from None


def read_decisions(path: str | Path, content: bytes | None = None) -> Iterator[Decision]:
    """The decisions of a log file, or of its ``content`` where that has been read. Raises :class:`InputError` naming the line
    that cannot be read.

    A line that was being written when its process died is left out.
    """
    try:
        text = (Path(path).read_bytes() if content is None else content).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for number, line in whole_lines(text):
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
_KIND_NAMES: dict[tuple[type, ...], str] = {
    (int, float): "a finite number",
    (int, float, type(None)): "a finite number or null",
    (int,): "a whole number",
    (str,): "text",
    (dict,): "an object",
}


def _finite(value: object) -> bool:
    """Of a number, whether the difference from another is one, too."""
    return not isinstance(value, int | float) or -_MOST <= value <= _MOST


def _decision(line: str, where: str) -> Decision:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"{where} is not JSON; is it a decision log?") from None
    if not isinstance(fields, dict):
        raise InputError(f"{where} is not a decision; is it a decision log?")
    if "v" not in fields:
        raise InputError(f"{where} is not a decision; is it a decision log?")
    if fields.pop("v") != VERSION:
        raise InputError(f"{where} has no version {VERSION} decision; this autotune reads version {VERSION}")
    missing = [name for name in Decision._fields if name != "wall" and name not in fields]
    unknown = [name for name in fields if name not in Decision._fields]
    if missing or unknown:
        raise InputError(f"{where}: {'missing' if missing else 'unknown'} field {(missing or unknown)[0]}")
    for name, kinds in _KINDS.items():
        value = fields.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool) or not _finite(value):
            raise InputError(f"{where}: {name} is {value!r:.40}; it must be {_KIND_NAMES[kinds]}")
    try:
        json.dumps(fields["evidence"], allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: evidence is no JSON: {error}") from None
    for name in ("old", "new"):
        if not isinstance(fields[name], dict):
            raise InputError(f"{where}: {name} is {fields[name]!r:.40}; it must be an object")
        try:
            Knobs.from_mapping(fields[name], where=f"{name}.")
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None
        absent = [s.name for s in KNOBS if s.required and s.name not in fields[name]]
        if absent:
            raise InputError(f"{where}: {name}.{absent[0]} is missing")
    return Decision.of(fields)


SHORT = {spec.name: spec.short for spec in KNOBS} | {"max_wait_ms": "wait_ms", "token_budget": "token_budget"}


def describe(decision: Decision) -> tuple[str, str]:
    """(what happened, why) of a decision, for a person."""
    what, why = worded(decision)
    return "  ".join(" ".join(line.split()) for line in what), why


def worded(decision: Decision, knobs: Collection[str] = ()) -> tuple[list[str], str]:
    """The same with a line for each knob that changed, values below each other; ``knobs``: only these, unless empty."""
    changes = [change for change in decision.changes if not knobs or change[0] in knobs]
    what = [f"{SHORT[name]:<12} {old:.10g} → {new:.10g}" for name, old, new in changes]
    if decision.action == "observe" and what:
        what = [f"(would set) {line}" for line in what]
    elif decision.action != "set" or not what:
        what.insert(0, decision.action)
    return what, f"{decision.cause} [{decision.regime}]" if decision.regime else decision.cause


def stated_slos(decision: Decision) -> dict[str, SLO]:
    """The SLOs that ``decision`` states, by class: on attaching, and when they change. Empty for any other, whose evidence is the
    controller's own.

    Raises :class:`InputError` for what is no SLO.
    """
    evidence = decision.evidence
    if decision.action not in ("attach", "note"):
        return {}
    stated = evidence.get("slos", {"default": evidence["slo"]} if "slo" in evidence else {})
    try:
        return {name: SLO.of(text) for name, text in stated.items()}
    except (ValueError, AttributeError) as error:
        raise InputError(f"the SLOs of the {decision.action} at {decision.at:g} s: {error}") from None
