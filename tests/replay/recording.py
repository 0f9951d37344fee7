"""What a controller was told, written down so that it can be told again, and the decisions it then makes.

A recording is a gzipped file of JSON lines: first the facts a controller is attached with, then every record in the order
in which it was told. Floats keep every digit, so what is read back is what was heard.

    python -m tests.replay.recording RECORDING [CONTROLLER]      print the decisions, one JSON line each
    python -m tests.replay.recording      the same for every ["RECORDING", "CONTROLLER"] on standard input, as one JSON string
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from autotune.control.attach import warm_model
from autotune.control.controllers.registry import CONTROLLERS
from autotune.control.guardrails import Guardrails
from autotune.control.loop import Control
from runtime.clock import VirtualClock
from runtime.knobs import KnobLimits, Knobs
from runtime.records import FinishReason, LimitedBy, RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.step_model import NO_GRAPHS, StepGraphs
from runtime.tunable import Capabilities, Facts, Lease, LeaseHolder, Listener, SchedulerView, StepPolicy, Tunable


@dataclass
class Recording:
    """Subscribe it to an engine before the controller, and it hears what the controller hears."""

    slo: SLO
    knobs: Knobs
    limits: KnobLimits
    kv_tokens: int
    block_size: int
    now: float
    interval_s: float = 0.25
    events: list[StepRecord | RequestRecord] = field(default_factory=list)
    graphs: StepGraphs = NO_GRAPHS

    @classmethod
    def of(cls, engine: Tunable, slo: SLO, interval_s: float = 0.25) -> Recording:
        """Begin to record ``engine``."""
        made = cls(
            slo,
            engine.knobs,
            engine.limits,
            engine.facts.kv_tokens,
            engine.facts.block_size,
            engine.view().now,
            interval_s,
            graphs=engine.facts.graphs,
        )
        engine.subscribe(made)
        return made

    def on_step(self, record: StepRecord) -> None:
        self.events.append(record)

    def on_request(self, record: RequestRecord) -> None:
        self.events.append(record)

    def save(self, path: Path) -> None:
        """The same bytes for the same recording."""
        facts = {
            "slo": str(self.slo), "knobs": self.knobs.as_dict(), "limits": self.limits.as_dict(), "now": self.now,
            "kv_tokens": self.kv_tokens, "block_size": self.block_size, "interval_s": self.interval_s,
            **({"graphs": astuple(self.graphs)} if self.graphs else {}),
        }  # fmt: skip
        lines = [facts, *(["step" if isinstance(e, StepRecord) else "request", *e] for e in self.events)]
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))

    @classmethod
    def load(cls, path: Path) -> Recording:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        facts = json.loads(lines[0])
        decodes, prompts, sequences = facts.get("graphs", ((), (), 0))
        facts["graphs"] = StepGraphs(tuple(decodes), tuple(prompts), sequences)
        made = cls(SLO.parse(facts.pop("slo")), Knobs(**facts.pop("knobs")), KnobLimits(**facts.pop("limits")), **facts)
        for line in lines[1:]:
            kind, *values = json.loads(line)
            if kind == "step":
                step = StepRecord(*values)
                made.events.append(step._replace(limited_by=LimitedBy(step.limited_by)))
            else:
                request = RequestRecord(*values)
                made.events.append(request._replace(reason=FinishReason(request.reason)))
        return made


class ReplayedEngine:
    """Holds knobs and a lease as an engine does, and tells its listeners what was recorded."""

    def __init__(self, recording: Recording) -> None:
        self.limits = self.effective_limits = recording.limits
        self.knobs, self.epoch, self.closed = recording.knobs, 0, False
        self.capabilities = Capabilities.live(admission=False)
        self.facts = Facts("recorded", kv_tokens=recording.kv_tokens, block_size=recording.block_size)
        self.clock, self.admission = VirtualClock(recording.now), None
        self.slos: Mapping[str, SLO] = {}
        self.weights: Mapping[str, float] = {}
        self._now = recording.now
        self._leases = LeaseHolder()
        self._listeners: list[Listener] = []

    @property
    def wanted_knobs(self) -> Knobs:
        return self.knobs

    def set_slo(self, slo: SLO, *, request_class: str = "default") -> None: ...

    def set_step_policy(self, policy: StepPolicy | None, *, lease: Lease | None = None) -> None:
        self._leases.check(lease)

    def set_knobs(self, knobs: Knobs | None = None, *, lease: Lease | None = None, **changes: float) -> int:
        self._leases.check(lease)
        wanted = self.limits.check(self.knobs.with_(**changes) if knobs is None else knobs)
        self.epoch += wanted != self.knobs
        self.knobs = wanted
        return self.epoch

    def acquire(self, owner: str) -> Lease:
        return self._leases.acquire(owner)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)
        return self._listeners.clear

    def view(self) -> SchedulerView:
        return SchedulerView(self._now, 0, 0, 0, 0, 0, 0, 1, 1, inf, inf, inf, self.knobs, self.epoch, self.limits)

    def tell(self, events: Iterable[StepRecord | RequestRecord]) -> None:
        for event in events:
            for listener in list(self._listeners):
                if isinstance(event, StepRecord):
                    listener.on_step(event)
                else:
                    listener.on_request(event)


def attach(engine: Tunable, recording: Recording, controller: str) -> Control:
    """A control whose decisions hold nothing of the wall clock."""
    model = warm_model(None, recording.graphs)
    made = CONTROLLERS[controller](recording.slo, engine.knobs, recording.kv_tokens, recording.block_size, model)
    return Control(
        engine, made, recording.slo, guardrails=Guardrails(), interval_s=recording.interval_s, wall=None
    )  # fmt: skip


def lines_of(control: Control) -> str:
    return "".join(decision.as_json() + "\n" for decision in control.decisions)


def replay(recording: Recording, controller: str = "predictive") -> str:
    """The decision lines of a fresh controller that is told ``recording``."""
    engine: Any = ReplayedEngine(recording)
    with attach(engine, recording, controller) as control:
        engine.tell(recording.events)
    return lines_of(control)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.stdout.write(replay(Recording.load(Path(sys.argv[1])), *sys.argv[2:3]))
    else:
        for line in sys.stdin:
            path, controller = json.loads(line)
            print(json.dumps(replay(Recording.load(Path(path)), controller)), flush=True)
