"""The metrics of an engine for Prometheus: a listener that collects records, and a collector that exposes them.

The engine's thread drops records into a queue; the rest is counted when somebody asks, or by whoever calls
:meth:`ServingMetrics.fold` now and then. Latencies are those of :class:`runtime.records.RequestRecord`, so a histogram counts a
request when it has ended, with all its gaps.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from os import fspath
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.knobs import KNOBS
from runtime.records import (
    QUEUE_TIMEOUT_REASON,
    SAME_CALL_REASON,
    SLO_REASON,
    FinishReason,
    LimitedBy,
    RequestRecord,
    StepRecord,
)
from runtime.serving.histogram import LatencyHistogram, bounds_with
from runtime.slo import METRICS, find_slo, wilson_interval
from runtime.tunable import Tunable, slo_history_of
from runtime.version import __version__

PREFIX: Final = "autotune_"
WINDOW_S: Final = 60.0
REJECTIONS: Final = ("queue_full", SLO_REASON, QUEUE_TIMEOUT_REASON, SAME_CALL_REASON, "closed", "invalid")
"""Why a request may have been rejected: causes of records, ``invalid`` for what could never run."""


class ServingMetrics(Collector):
    """Listens to ``engine`` from now on. ``window_s``: how far attainment looks back. ``regime``: that of the controller, if one
    is attached; it must be quick, for a scrape calls it."""

    def __init__(
        self,
        engine: Tunable,
        *,
        served_name: str | None = None,
        window_s: float = WINDOW_S,
        regime: Callable[[], str] | None = None,
    ) -> None:
        self.window_s = window_s
        self.registry = CollectorRegistry()
        self._engine = engine
        self._regime = regime
        self._name = served_name or ("" if engine.facts.model is None else engine.facts.model.name)
        bounds = bounds_with(
            target / 1000 for slo in engine.slos.values() for target in slo.targets_ms.values() if target is not None
        )
        self.queue_time, self.ttft, self.tpot, self.itl, self.e2e, self.step = (
            LatencyHistogram(f"{PREFIX}{name}_seconds", doc, bounds)
            for name, doc in (
                ("queue_time", "From arrival to the first step a request took part in"),
                ("time_to_first_token", "From arrival to the first token"),
                ("time_per_output_token", "(last token - first token) / (output tokens - 1) of each request"),
                ("inter_token_latency", "Gaps between neighbouring tokens of a request"),
                ("e2e_latency", "From arrival to the last token"),
                ("step_duration", "Time of an engine step"),
            )
        )
        self._lock = threading.Lock()  # guards what is counted; the engine's thread never takes it
        self._requests: deque[RequestRecord] = deque()
        self._steps: deque[StepRecord] = deque()
        self._ended: Counter[FinishReason] = Counter()
        self._limited: Counter[LimitedBy] = Counter()
        self._tokens: Counter[str] = Counter()
        self._violations: Counter[str] = Counter()
        self._rejections: Counter[str] = Counter()
        self._relegated: Counter[str] = Counter()  # by class
        self._preemptions = 0
        self._slos = slo_history_of(engine)
        self._met: Counter[str] = Counter()  # by class, as the next three
        self._offered: Counter[str] = Counter()
        self._window_met: Counter[str] = Counter()
        self._window_offered: Counter[str] = Counter()
        self._window: deque[tuple[float, str, bool]] = deque()  # (when it ended, class, whether it met its SLO)
        self.close = engine.subscribe(self)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # -- in the engine's thread -----------------------------------------------------------------------------------------

    def on_step(self, record: StepRecord) -> None:
        self._slos()
        self._steps.append(record)

    def on_request(self, record: RequestRecord) -> None:
        self._slos()
        self._requests.append(record)

    # -- in any other ---------------------------------------------------------------------------------------------------

    def fold(self) -> None:
        """Count what has come in. Call it every second or so: a record is kept until then."""
        with self._lock:
            steps = [self._steps.popleft() for _ in range(len(self._steps))]
            self.step.observe_all([record.duration for record in steps for _ in range(record.steps)])
            for step in steps:
                self._limited[step.limited_by] += step.steps
                self._preemptions += step.preemptions
                self._tokens["prefill"] += step.prefill_tokens * step.steps
                self._tokens["output"] += step.sampled * step.steps
                self._tokens["drafted"] += step.drafted
                self._tokens["accepted"] += step.accepted
            for record in [self._requests.popleft() for _ in range(len(self._requests))]:
                self._count(record)
            self._slide(self._engine.clock.now())

    def write(self, path: Path) -> None:
        """All of it as a text file, in one piece, as node_exporter's textfile collector reads it."""
        write_to_textfile(fspath(path), self.registry)

    def _count(self, record: RequestRecord) -> None:
        self._ended[record.reason] += 1
        if record.reason is FinishReason.REJECTED:
            self._rejections[record.cause if record.cause in REJECTIONS else "invalid"] += 1
        if record.relegated:
            self._relegated[record.request_class if record.request_class in self._engine.slos else "default"] += 1
        if record.scheduled is not None:  # else nobody looked for its prompt in the prefix cache
            self._tokens["prompt"] += record.prompt_tokens
            self._tokens["cached"] += record.cached_tokens
        self.queue_time.observe(record.queue_time)
        self.ttft.observe(record.ttft)
        self.tpot.observe(record.tpot)
        self.itl.observe_all(record.itl)
        self.e2e.observe(record.e2e)
        slos = self._slos().at(record.arrival)
        slo = find_slo(slos, record.request_class)
        if slo is not None and record.offered:
            missed = slo.violated(record)
            name = record.request_class if record.request_class in slos else "default"
            self._violations.update(missed)
            self._offered[name] += 1
            self._met[name] += not missed
            self._window.append((record.finished, name, not missed))
            self._window_offered[name] += 1
            self._window_met[name] += not missed

    def _slide(self, now: float) -> None:
        window = self._window
        while window and window[0][0] < now - self.window_s:
            _, name, met = window.popleft()
            self._window_offered[name] -= 1
            self._window_met[name] -= met

    def collect(self) -> Iterator[Metric]:
        """Every metric. Waits for the engine's step in progress, so that what it says of the queue and the KV pool is so."""
        engine = self._engine
        view = engine.view()
        self.fold()
        info = GaugeMetricFamily(f"{PREFIX}info", "What is served; always 1", labels=["model", "version"])
        info.add_metric([self._name, __version__], 1)
        yield info
        if self._regime is not None:
            regime = GaugeMetricFamily(
                f"{PREFIX}control_regime", "Regime of the controller; always 1", labels=["regime"]
            )
            regime.add_metric([self._regime()], 1)
            yield regime
        used = view.kv_total_blocks - view.kv_free_blocks
        for name, doc, value in (
            ("up", "Whether the engine runs", not engine.closed),
            ("requests_waiting", "Requests in the queue", view.waiting),
            ("requests_running", "Requests in the batch", view.running),
            ("requests_decoding", "Of those in the batch, the ones past their prompt", view.decoding),
            ("waiting_tokens", "Prompt tokens queued and not found in the prefix cache", view.waiting_tokens),
            ("kv_blocks", "Blocks of the KV pool", view.kv_total_blocks),
            ("kv_blocks_free", "Blocks that no running request holds", view.kv_free_blocks),
            ("kv_usage_ratio", "Share of the KV pool in use", used / max(1, view.kv_total_blocks)),
            ("epoch", "Number of the knob setting in force", view.epoch),
        ):
            yield GaugeMetricFamily(f"{PREFIX}{name}", doc, float(value))
        for spec in KNOBS:
            doc = f"{spec.doc} ({spec.unit})"
            yield GaugeMetricFamily(f"{PREFIX}knob_{spec.name}", f"Knob: {doc}", getattr(view.knobs, spec.name))
            ceiling = getattr(view.effective_limits, spec.name)
            yield GaugeMetricFamily(f"{PREFIX}knob_limit_{spec.name}", f"Ceiling in force of the knob: {doc}", ceiling)
        with self._lock:
            counted = [*self._counters(), *self._attainment()]
            counted += [h.family() for h in (self.queue_time, self.ttft, self.tpot, self.itl, self.e2e, self.step)]
        yield from counted

    def _counters(self) -> Iterator[Metric]:
        for name, doc, value in (
            ("prompt_tokens", "Prompt tokens of requests that were scheduled and have ended", self._tokens["prompt"]),
            ("cached_prompt_tokens", "Of those, the ones found in the prefix cache", self._tokens["cached"]),
            ("prefill_tokens", "Tokens computed by prefill chunks, repeated ones included", self._tokens["prefill"]),
            ("output_tokens", "Output tokens sampled", self._tokens["output"]),
            ("drafted_tokens", "Tokens drafted and verified", self._tokens["drafted"]),
            ("accepted_tokens", "Of those, the ones that were right", self._tokens["accepted"]),
            ("preemptions", "Times a running request gave its KV blocks back", self._preemptions),
        ):
            yield CounterMetricFamily(f"{PREFIX}{name}", doc, value)
        ended = CounterMetricFamily(f"{PREFIX}requests", "Requests that have ended, by how", labels=["reason"])
        for reason in FinishReason:
            ended.add_metric([reason.value], self._ended[reason])
        yield ended
        rejected = CounterMetricFamily(
            f"{PREFIX}requests_rejected", "Requests that were rejected, by why", labels=["why"]
        )
        for why in REJECTIONS:
            rejected.add_metric([why], self._rejections[why])
        yield rejected
        relegated = CounterMetricFamily(
            f"{PREFIX}requests_relegated",
            "Requests that have ended and once waited behind all that could still meet their SLO",
            labels=["class"],
        )
        for name in {"default": None, **dict.fromkeys(self._engine.slos)}:
            relegated.add_metric([name], self._relegated[name])
        yield relegated
        steps = CounterMetricFamily(
            f"{PREFIX}steps", "Engine steps, by what kept them from holding more", labels=["limited_by"]
        )
        for limit in LimitedBy:
            steps.add_metric([limit.value], self._limited[limit])
        yield steps

    def _attainment(self) -> Iterator[Metric]:
        """The share of each class in the window, and counters of which that of any other window, or of several classes, can be
        made. Nothing without an SLO."""
        slos = self._engine.slos
        if not slos:
            return
        target = GaugeMetricFamily(f"{PREFIX}slo_target_seconds", "Targets of the SLO", labels=["class", "metric"])
        share = GaugeMetricFamily(
            f"{PREFIX}slo_attainment_target", "Attainment that the SLO asks for", labels=["class"]
        )
        for name, slo in slos.items():
            share.add_metric([name], slo.attainment)
            for metric, ms in slo.targets_ms.items():
                if ms is not None:
                    target.add_metric([name, metric], ms / 1000)
        yield target
        yield share
        span = f"of the last {self.window_s:g} s"
        counts = {name: (self._window_met[name], self._window_offered[name]) for name in slos}
        ends = {name: wilson_interval(*count) for name, count in counts.items()}
        for name, doc, values in (
            ("slo_window_requests", f"Offered requests {span}", {c: of for c, (_, of) in counts.items()}),
            (
                "slo_attainment",
                f"Share of them that met the SLO; NaN of none, {span}",
                {c: _share(met, of) for c, (met, of) in counts.items()},
            ),
            ("slo_attainment_low", "Lower end of its 95% Wilson interval", {c: low for c, (low, _) in ends.items()}),
            ("slo_attainment_high", "Upper end of its 95% Wilson interval", {c: high for c, (_, high) in ends.items()}),
        ):
            gauge = GaugeMetricFamily(f"{PREFIX}{name}", doc, labels=["class"])
            for request_class, value in values.items():
                gauge.add_metric([request_class], value)
            yield gauge
        for name, doc, so_far in (
            ("slo_offered", "Offered requests that have ended", self._offered),
            ("slo_met", "Of those, the ones that met the SLO", self._met),
        ):
            counter = CounterMetricFamily(f"{PREFIX}{name}", doc, labels=["class"])
            for request_class in slos:
                counter.add_metric([request_class], so_far[request_class])
            yield counter
        missed = CounterMetricFamily(
            f"{PREFIX}slo_violations", "Targets missed; completion: did not run to its end", labels=["metric"]
        )
        for metric in (*METRICS, "completion"):
            missed.add_metric([metric], self._violations[metric])
        yield missed


def _share(met: int, offered: int) -> float:
    return met / offered if offered else float("nan")
