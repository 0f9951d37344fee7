"""Metrics say what the records say, with buckets fine enough to steer by."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from runtime.knobs import KNOBS
from runtime.records import FinishReason, LimitedBy, RequestRecord
from runtime.serving.histogram import BOUNDS, LatencyHistogram, bounds_with
from runtime.serving.metrics import ServingMetrics
from runtime.slo import SLO, RequestClass
from runtime.version import __version__
from tests.building import request_record
from tests.engines import Bench, bench
from tests.fakes import count_up

LATENCIES = {
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "e2e_latency": "e2e",
    "queue_time": "queue_time",
}
DEFAULT = {"class": "default"}


class Scrape:
    """The exposition, parsed by prometheus_client's own parser."""

    def __init__(self, metrics: ServingMetrics) -> None:
        self.text = generate_latest(metrics.registry).decode()
        self.values = {
            (sample.name.removeprefix("autotune_"), *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.values[(name, *sorted(labels.items()))]

    def buckets(self, name: str) -> dict[float, float]:
        """Cumulative counts by upper bound."""
        return {
            float(dict(labels)["le"]): value  # type: ignore[arg-type]  # pairs of text
            for (found, *labels), value in self.values.items()
            if found == f"{name}_seconds_bucket"
        }


def test_bounds_are_fine_everywhere_and_cover_a_minute() -> None:
    assert BOUNDS[0] == 0.001 and BOUNDS[-1] >= 60
    assert max(b / a for a, b in pairwise(BOUNDS)) < 1.13
    assert {0.05, 0.2, 0.5, 1.0, 2.0} <= set(BOUNDS), "usual targets"


def test_the_targets_of_the_slo_are_bounds() -> None:
    with bench(slo="ttft=333ms,tpot=42ms") as b:
        scrape = Scrape(ServingMetrics(b.engine))
    assert {0.333, 0.042} <= set(scrape.buckets("time_to_first_token"))
    assert bounds_with([0.05]) == BOUNDS


def test_a_value_on_a_bound_is_within_it() -> None:
    histogram = LatencyHistogram("x", "", (0.1, 0.2))
    histogram.observe_all([0.05, 0.1, 0.15, 0.2, 0.3])
    histogram.observe(None)
    samples = {s.labels.get("le", s.name): s.value for s in histogram.family().samples}
    assert samples == {"0.1": 2, "0.2": 4, "+Inf": 5, "x_count": 5, "x_sum": pytest.approx(0.8)}


def test_a_quantile_read_off_the_buckets_is_close() -> None:
    histogram = LatencyHistogram("x", "")
    values = [0.003 * 1.01**n for n in range(900)]
    histogram.observe_all(values)
    counts = {float(s.labels["le"]): s.value for s in histogram.family().samples if "le" in s.labels}
    for q in (0.1, 0.5, 0.9, 0.99):
        true = values[math.ceil(q * 900) - 1]
        read = next(bound for bound, count in counts.items() if count >= q * 900)
        assert true <= read <= true * 1.13


def run(b: Bench, **options: Any) -> list[RequestRecord]:
    done = b.engine.generate([[i] * (i + 1) for i in range(6)], max_tokens=5, **options)
    return [completion.record for completion in done]


def test_histograms_equal_the_records() -> None:
    with bench() as b:
        metrics = ServingMetrics(b.engine)
        records = run(b)
        scrape = Scrape(metrics)
    expected = {name: [getattr(r, field) for r in records] for name, field in LATENCIES.items()}
    expected["inter_token_latency"] = [gap for record in records for gap in record.itl]
    for name, values in expected.items():
        buckets = scrape.buckets(name)
        assert set(BOUNDS) | {math.inf} == set(buckets)
        assert all(count == sum(v <= bound for v in values) for bound, count in buckets.items()), name
        assert scrape(f"{name}_seconds_count") == len(values)
        assert scrape(f"{name}_seconds_sum") == pytest.approx(sum(values))


def test_counters_and_gauges() -> None:
    with bench() as b:
        metrics = ServingMetrics(b.engine, served_name="mine")
        records = run(b)
        b.engine.set_knobs(b.engine.knobs.with_(token_budget=17, max_batch_size=3))
        scrape = Scrape(metrics)
        steps = b.heard.steps
        assert scrape("info", model="mine", version=__version__) == 1
        for spec in KNOBS:
            assert scrape(f"knob_{spec.name}") == getattr(b.engine.knobs, spec.name)
            assert scrape(f"knob_limit_{spec.name}") == getattr(b.engine.effective_limits, spec.name)
        assert scrape("epoch") == b.engine.epoch == 1
        assert scrape("kv_blocks") == scrape("kv_blocks_free") == 1024 / 16
        assert scrape("kv_usage_ratio") == scrape("requests_running") == scrape("requests_waiting") == 0
        assert scrape("prompt_tokens_total") == sum(r.prompt_tokens for r in records) == 21
        assert scrape("output_tokens_total") == 30
        assert scrape("prefill_tokens_total") == sum(step.prefill_tokens for step in steps)
        assert scrape("step_duration_seconds_count") == len(steps)
        for limit in LimitedBy:
            assert scrape("steps_total", limited_by=limit) == sum(step.limited_by is limit for step in steps)
    assert not any(name.startswith("slo") for name, *_ in scrape.values), "there is no SLO"


def test_a_look_in_the_middle() -> None:
    with bench(knobs=None) as b:
        metrics = ServingMetrics(b.engine)
        streams = b.decoding(3)
        b.engine.set_knobs(b.engine.knobs.with_(max_batch_size=3))
        waiting = b.engine.submit([7] * 9, max_tokens=2)
        b.step()
        b.executor.go()  # the look itself waits for a step to end
        scrape = Scrape(metrics)
        if scrape("requests_running") == 3:  # unless they ended meanwhile
            assert scrape("kv_blocks_free") < scrape("kv_blocks") and scrape("kv_usage_ratio") > 0
        assert scrape("requests_total", reason="cancelled") == 0
        for stream in (*streams, waiting):
            stream.cancel()


def test_preemptions_are_counted() -> None:
    with bench(kv_tokens=32, block_size=4) as b:
        metrics = ServingMetrics(b.engine)
        records = [c.record for c in b.engine.generate([[1] * 8, [2] * 8], max_tokens=16)]
        scrape = Scrape(metrics)
    assert scrape("preemptions_total") == sum(r.preemptions for r in records) > 0


def test_every_way_to_end_is_told() -> None:
    def sample(sequence: Any) -> int:
        if sequence.request.prompt[0] == 9:
            raise ArithmeticError
        return count_up(sequence)

    with bench(sample, max_queue=1) as b:
        metrics = ServingMetrics(b.engine)
        b.engine.generate([[1]], max_tokens=2)
        b.engine.generate([[1]], max_tokens=9, stop_token_ids=(3,))
        b.engine.generate([[9]], max_tokens=2, return_exceptions=True)
        b.executor.hold()
        held = b.engine.submit([1], max_tokens=50)
        b.held()
        late = b.engine.submit([1], timeout_s=1e-6)
        with pytest.raises(Exception, match="max_queue"):
            b.engine.submit([1])
        held.cancel()
        b.executor.go()
        with pytest.raises(Exception, match="timed out"):
            late.result(timeout=30)
        scrape = Scrape(metrics)
    assert {reason: scrape("requests_total", reason=reason) for reason in FinishReason} == dict.fromkeys(
        FinishReason, 1
    )


def test_the_regime_of_a_controller() -> None:
    regimes = iter(["learning", "kv-limited"])
    with bench() as b:
        metrics = ServingMetrics(b.engine, regime=lambda: next(regimes))
        assert Scrape(metrics)("control_regime", regime="learning") == 1
        values = Scrape(metrics).values
    assert [labels for name, *labels in values if name == "control_regime"] == [[("regime", "kv-limited")]]


def test_attainment_slides() -> None:
    with bench(slo=SLO(ttft_ms=100, attainment=0.9)) as b:
        metrics = ServingMetrics(b.engine, window_s=60)
        now = b.engine.clock.now()

        def ended(at: float, ttft: float, reason: FinishReason = FinishReason.LENGTH) -> None:
            record = request_record([at], arrival=at - ttft, finished=at, reason=reason)
            metrics.on_request(record)

        for at in (-100.0, -90.0):
            ended(now + at, 0.5)
        for ttft in (0.05, 0.09, 0.2):
            ended(now, ttft)
        ended(now, 0.05, FinishReason.REJECTED)
        ended(now, 0.05, FinishReason.CANCELLED)
        scrape = Scrape(metrics)
        assert scrape("slo_window_requests", **DEFAULT) == 4 and scrape("slo_attainment", **DEFAULT) == 0.5
        assert scrape("slo_attainment_low", **DEFAULT) < 0.5 < scrape("slo_attainment_high", **DEFAULT)
        assert (scrape("slo_offered_total", **DEFAULT), scrape("slo_met_total", **DEFAULT)) == (6, 2)
        assert scrape("slo_violations_total", metric="ttft") == 3
        assert scrape("slo_violations_total", metric="completion") == 1
        assert scrape("slo_target_seconds", **DEFAULT, metric="ttft") == 0.1
        assert scrape("slo_attainment_target", **DEFAULT) == 0.9
        metrics.window_s = 0.0
        assert math.isnan(Scrape(metrics)("slo_attainment", **DEFAULT))


def test_attainment_is_of_each_class_against_its_own_target() -> None:
    classes = [RequestClass("late", SLO(ttft_ms=900, attainment=0.5))]
    with bench(slo=SLO(ttft_ms=100, attainment=0.9), classes=classes) as b:
        metrics, now = ServingMetrics(b.engine), b.engine.clock.now()
        for name, count in (("late", 3), ("default", 2), ("unknown", 1)):
            for _ in range(count):
                metrics.on_request(request_record([now], arrival=now - 0.5, finished=now, request_class=name))
        scrape = Scrape(metrics)
    late = {"class": "late"}
    for labels, met, offered, target in ((late, 3, 3, 0.5), (DEFAULT, 0, 3, 0.9)):
        assert scrape("slo_met_total", **labels) == met and scrape("slo_attainment", **labels) == met / offered
        assert scrape("slo_offered_total", **labels) == scrape("slo_window_requests", **labels) == offered
        assert scrape("slo_attainment_target", **labels) == target


def test_a_request_is_judged_by_the_slo_of_when_it_came() -> None:
    with bench(slo=SLO(e2e_ms=100_000)) as b:
        metrics, now = ServingMetrics(b.engine), b.engine.clock.now()
        metrics.on_request(request_record([now], arrival=now - 0.5, finished=now))
        b.engine.set_slo(SLO(e2e_ms=100))
        for begin in (now - 0.5, now, now + 5):
            metrics.on_request(request_record([begin + 1], arrival=begin, finished=begin + 1))
        scrape = Scrape(metrics)
    assert (scrape("slo_met_total", **DEFAULT), scrape("slo_offered_total", **DEFAULT)) == (3, 4)
    assert scrape("slo_target_seconds", **DEFAULT, metric="e2e") == 0.1


def test_prompts_that_were_refused_are_not_in_the_hit_rate() -> None:
    with bench() as b:
        metrics = ServingMetrics(b.engine)
        record = request_record([1.0], arrival=0.5, scheduled=0.6)._replace(cached_tokens=4)
        metrics.on_request(record)
        metrics.on_request(request_record(reason=FinishReason.REJECTED))
        scrape = Scrape(metrics)
    assert (scrape("prompt_tokens_total"), scrape("cached_prompt_tokens_total")) == (10, 4)


def test_nothing_is_lost_or_told_twice_whoever_folds() -> None:
    with bench() as b:
        metrics = ServingMetrics(b.engine)
        for _ in range(3):
            run(b)
            metrics.fold()
        run(b)
        first, second = Scrape(metrics), Scrape(metrics)
        metrics.close()
        run(b)
        third = Scrape(metrics)
    for scrape in (first, second, third):
        assert scrape("requests_total", reason="length") == scrape("time_to_first_token_seconds_count") == 24


def test_two_servers_share_nothing() -> None:
    with bench() as one, bench() as other:
        mine, theirs = ServingMetrics(one.engine), ServingMetrics(other.engine)
        run(one)
        assert Scrape(mine)("requests_total", reason="length") == 6
        assert Scrape(theirs)("requests_total", reason="length") == 0


def test_a_class_without_an_slo_counts_in_no_attainment() -> None:
    record = request_record([1.0], arrival=0.5)
    with bench() as b:
        metrics = ServingMetrics(b.engine)
        metrics.on_request(replace_class(record))
        assert Scrape(metrics)("requests_total", reason="length") == 1


def replace_class(record: RequestRecord) -> RequestRecord:
    return record._replace(request_class="other")
