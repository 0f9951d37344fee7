"""What searches have found, kept in a file: valid as long as the simulator behaves, and is searched, as it was then.

An entry carries a digest. It is of what the simulator does with a fixed probe: a scenario's requests of one seed, its phases and
its machine, under one fixed setting; when each request ended, why, and after how many tokens. And it is of the settings that were
searched, and the constants of the search. Source that changes without changing behaviour leaves it alone; a scheduler, a machine,
a workload or a grid that is another makes the entry unknown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from autotune.simulate import SimulatedEngine
from autotune.writing import write_whole
from benchmarks.controller.contenders import CONTENDERS, STATIC
from benchmarks.controller.oracle import Best
from benchmarks.controller.run import Bench, Outcome, run, serve
from benchmarks.controller.run import requests as requests_of
from benchmarks.controller.scenarios import HARDWARE, Load, Phase, Scenario
from runtime.knobs import Knobs
from runtime.records import RequestRecord, StepRecord

FOLDER = Path(__file__).parents[1] / "data"
PROBE = Knobs(max_batch_size=64, max_wait_ms=0, token_budget=1024, chunk_size=512)
_SEED = 0
_RATE = 30.0  # requests/s of the probe of a load: enough to miss SLOs


class Digest:
    """Listens to a run."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def on_step(self, record: StepRecord) -> None:
        pass

    def on_run(self, record: StepRecord, ends: Sequence[float]) -> None:
        pass

    def on_request(self, record: RequestRecord) -> None:
        # to 10 µs: what the last bits are may depend on the machine
        self._hash.update(f"{record.id} {record.finished:.5f} {record.reason} {len(record.token_times)};".encode())

    def text(self, outcome: Outcome) -> str:
        """Of what was heard and what was thought of it: SLOs are part of the behaviour."""
        self._hash.update(repr(outcome).encode())
        return self._hash.hexdigest()[:16]


def scenario_digest(scenario: Scenario, contender: str, bench: Bench) -> str:
    """How ``contender`` serves the scenario at the probe's setting, in short."""
    digest = Digest()
    outcome = run(scenario, _heard(CONTENDERS[contender].driver((PROBE,)), digest), _SEED, bench)
    return digest.text(outcome)


def load_digest(load: Load, bench: Bench) -> str:
    """How half a minute of ``load`` is served at the probe's setting, in short."""
    digest = Digest()
    scenario = Scenario(str(load), "", HARDWARE[load.hardware], (Phase(30.0, load.parts, _RATE),))
    offered = requests_of(scenario, _SEED, (_RATE,), bench.traces)
    outcome = serve(scenario, offered, _heard(CONTENDERS[STATIC].driver((PROBE,)), digest), _SEED)
    return digest.text(outcome)


def search_digest(behaviour: str, cells: Iterable[Knobs], *constants: object) -> str:
    """How the simulator behaves, a digest of its own, and what is searched there: ``cells``, by the knobs that a grid has, and
    how."""
    searched = [(cell.max_batch_size, cell.token_budget, cell.chunk_size) for cell in cells]
    return hashlib.sha256(repr((behaviour, searched, constants)).encode()).hexdigest()[:16]


def _heard(driver: Any, digest: Digest) -> Any:
    attach: Callable[..., Any] = driver.attach

    def listening(engine: SimulatedEngine, slo: Any) -> Any:
        engine.subscribe(digest)
        return attach(engine, slo)

    return driver._replace(attach=listening)


class Cache:
    """Entries by name in one file of JSON, an entry a line. Without ``use`` only those are given out that were put here."""

    def __init__(self, path: Path, *, use: bool = True) -> None:
        self.path = path
        self._entries = self._read()
        self._use = use
        self._put: set[str] = set()

    def _read(self) -> dict[str, dict[str, Any]]:
        return dict(json.loads(self.path.read_text(encoding="utf-8"))) if self.path.is_file() else {}

    def get(self, name: str, digest: str) -> dict[str, Any] | None:
        """The entry, if it is of this digest and may be used."""
        entry = self._entries.get(name)
        usable = self._use or name in self._put
        return entry if usable and entry is not None and entry["digest"] == digest else None

    def entry(self, name: str) -> dict[str, Any] | None:
        """The entry, whatever its digest: for a report of what was found once."""
        return self._entries.get(name)

    def put(self, name: str, digest: str, entry: dict[str, Any]) -> None:
        """Keep ``entry``, on disk at once, beside what another run has put there meanwhile."""
        self._put.add(name)
        self._entries = self._read() | {name: {"digest": digest, **entry}}
        lines = ",\n".join(
            f" {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}"
            for key, value in sorted(self._entries.items())
        )
        self.path.parent.mkdir(exist_ok=True)
        write_whole(self.path, f"{{\n{lines}\n}}\n")


def to_entry(best: Best) -> dict[str, Any]:
    """A search's finding as JSON."""
    return {
        "schedule": [_values(knobs) for knobs in best.schedule],
        "by_seed": {str(seed): outcome for seed, outcome in best.by_seed.items()},
        "single": _values(best.single),
        "single_met": {str(seed): met for seed, met in best.single_met.items()},
        "runs": best.runs,
    }


def from_entry(entry: dict[str, Any]) -> Best:
    """The inverse of :func:`to_entry`."""
    return Best(
        tuple(_knobs(values) for values in entry["schedule"]),
        {int(seed): outcome_of(values) for seed, values in entry["by_seed"].items()},
        _knobs(entry["single"]),
        {int(seed): met for seed, met in entry["single_met"].items()},
        entry["runs"],
    )


def _values(knobs: Knobs) -> list[float]:
    return list(knobs.as_dict().values())


def _knobs(values: Sequence[float]) -> Knobs:
    """The knobs of an entry; one made before a knob was there has nothing of it, and it stays at its default."""
    default = Knobs().as_dict()
    return Knobs.from_mapping(default | dict(zip(default, values, strict=False)))


def outcome_of(values: Sequence[Any]) -> Outcome:
    """An :class:`Outcome` from what JSON makes of it."""
    phases, bins, rejected, full = values
    return Outcome(tuple((o, m) for o, m in phases), tuple((o, m) for o, m in bins), rejected, full)
