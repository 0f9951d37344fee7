"""``autotune advise``: what is read from a server's metrics, and what is said of settings under its traffic."""

from __future__ import annotations

import json
import math
import random
import shlex
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from autotune.advise.advice import advice, cautions, live, startable, without_counterpart
from autotune.advise.traffic import Histogram as Counted
from autotune.advise.traffic import Traffic
from autotune.cli.main import run
from autotune.cli.simulation_options import by_knobs
from autotune.engines.named import _ENGINES, engine_named, engine_of_metrics
from autotune.export import TARGETS
from autotune.measure.evaluate import EvaluationError
from autotune.profile import Point, save_profile
from autotune.report.profile_table import EVERY_PURPOSE
from autotune.workload import parse_workload
from runtime.errors import InputError
from runtime.knobs import Knobs
from runtime.serving.scrape import Scrape, scrape
from runtime.slo import SLO
from tests.unit.profiles import profile
from tests.unit.simulated_profile import profiled

NAMES = engine_named("vllm").metrics
assert NAMES is not None
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


class Server:
    """Exposes what vLLM's server exposes, by the library that it does that with. Each scrape finds ``each`` more requests."""

    def __init__(self, each: int = 4, ttft: float = 0.12, tpot: float = 0.015, model: str = "m") -> None:
        self.registry = CollectorRegistry()
        assert NAMES is not None
        self.running = Gauge(NAMES.running, "", NAMES.replica, registry=self.registry)
        self.waiting = Gauge(NAMES.waiting, "", NAMES.replica, registry=self.registry)
        self.ended = Counter(NAMES.ended.removesuffix("_total"), "", ["finished_reason"], registry=self.registry)
        self.preemptions = Counter(NAMES.preemptions.removesuffix("_total"), "", registry=self.registry)
        self.queries = Counter(NAMES.cache_queries.removesuffix("_total"), "", registry=self.registry)
        self.hits = Counter(NAMES.cache_hits.removesuffix("_total"), "", registry=self.registry)
        self.prompt = Histogram(NAMES.prompt_tokens, "", buckets=LENGTHS, registry=self.registry)
        self.output = Histogram(NAMES.output_tokens, "", buckets=LENGTHS, registry=self.registry)
        self.ttft = Histogram(NAMES.ttft_seconds, "", buckets=SECONDS, registry=self.registry)
        self.tpot = Histogram(NAMES.tpot_seconds, "", buckets=SECONDS, registry=self.registry)
        self.e2e = Histogram(NAMES.e2e_seconds, "", buckets=SECONDS, registry=self.registry)
        self.random = random.Random(0)
        self.each, self.times = each, (ttft, tpot)
        self.running.labels(model, "0").set(3)
        self.waiting.labels(model, "0").set(0)
        self.serve(50)  # before anybody watches

    def serve(self, count: int) -> None:
        for i in range(count):
            self.ended.labels("stop" if i % 2 else "length").inc()
            self.prompt.observe(self.random.lognormvariate(5.0, 0.8))
            self.output.observe(self.random.randint(20, 40))
            self.ttft.observe(self.times[0])
            self.tpot.observe(self.times[1])
            self.e2e.observe(self.times[0] + 30 * self.times[1])

    def text(self) -> bytes:
        self.serve(self.each)
        return generate_latest(self.registry)


@contextmanager
def serving(server: Any) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = server.text() if self.path == "/metrics" else b""
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def watched(server: Server, count: int = 30, apart: float = 1.0) -> list[Scrape]:
    with serving(server) as url:
        found = [scrape(url) for _ in range(count)]
    return [one._replace(at=apart * i) for i, one in enumerate(found)]


def test_traffic_is_what_came_between_the_scrapes() -> None:
    assert NAMES is not None
    server = Server(each=4)
    found = Traffic.of(watched(server, 31), NAMES)
    assert (found.seconds, found.ended, found.arrived, found.rate) == (30.0, 120.0, 120.0, 4.0)
    assert (found.running, found.waiting, found.preemptions, found.dispersion) == (3.0, 0.0, 0.0, 0.0)
    assert (
        found.ttft.count == 120 and found.ttft.mean == pytest.approx(0.12) and 0.1 <= found.ttft.quantile(0.5) <= 0.25
    )
    load = parse_workload(found.spelled())
    lengths = [a for a in load.arrivals(0, duration=500)]
    assert load.rate == 4.0 and load.length_scale == 1.0
    assert statistics.fmean(a.prompt_tokens for a in lengths) == pytest.approx(found.prompt.mean, rel=0.1)
    assert 20 <= statistics.fmean(a.output_tokens for a in lengths) <= 40
    share = found.attainment(SLO(ttft_ms=100, tpot_ms=50, e2e_ms=10_000))
    assert share["ttft"] == (0.0, 0.0) and share["e2e"] == (1.0, 1.0)
    assert share["tpot"] == (1.0, 1.0), "all are in a bucket below"
    assert found.attainment(SLO(ttft_ms=120))["ttft"] == (0.0, 1.0), "the bounds do not tell"


def test_requests_that_arrived_and_have_not_ended_count_as_arrivals() -> None:
    assert NAMES is not None
    server = Server(each=20)
    first = watched(server, 1)
    server.waiting.labels("m", "0").set(30)
    found = Traffic.of([*first, watched(server, 1)[0]._replace(at=10.0)], NAMES)
    assert (found.ended, found.arrived, found.rate) == (20.0, 50.0, 5.0)


def test_requests_that_their_clients_gave_up_count_as_arrivals() -> None:
    """They end without being counted among those that ended; most had a first token."""
    assert NAMES is not None
    server = Server(each=20)
    first = watched(server, 1)
    for _ in range(10):
        server.ttft.observe(0.1)
    found = Traffic.of([*first, watched(server, 1)[0]._replace(at=10.0)], NAMES)
    assert (found.ended, found.arrived) == (20.0, 30.0)


def test_engines_behind_one_page_share_the_requests_and_models_do_not_mix() -> None:
    assert NAMES is not None
    server = Server(each=8)
    server.running.labels("m", "1").set(1)
    found = Traffic.of(watched(server, 31), NAMES)
    assert (found.engines, found.rate, found.running) == (2, 8.0, 4.0) and parse_workload(found.spelled()).rate == 4.0
    assert (
        list(live(found, SLO(ttft_ms=100)))[1]
        == "live: 2 engines share them; one is simulated, with 50% of the requests"
    )
    server.running.labels("other", "0").set(1)
    with pytest.raises(EvaluationError, match="metrics of several models, added up: m, other"):
        Traffic.of(watched(server, 31), NAMES)


def test_an_even_stream_seen_at_uneven_times_is_no_burst() -> None:
    assert NAMES is not None
    server, at, scrapes = Server(each=0), 0.0, []
    with serving(server) as url:
        for i in range(41):
            apart = (0.6, 0.6, 9.0, 0.6)[i % 4]
            server.each, at = (0 if i == 0 else round(apart * 10)), at + apart
            scrapes.append(scrape(url)._replace(at=at))
    found = Traffic.of(scrapes, NAMES)
    assert found.dispersion is not None and found.dispersion < 0.1


def test_answers_of_one_token_have_no_time_per_token() -> None:
    assert NAMES is not None
    server = Server(each=4)
    first = watched(server, 1)
    for _ in range(30):
        server.output.observe(1)
        server.tpot.observe(0.0)
    found = Traffic.of([*first, *(one._replace(at=i + 1.0) for i, one in enumerate(watched(server, 30)))], NAMES)
    assert found.tpot.count == 120 and found.tpot.bucket(0.5) == (0.01, 0.02)


def test_bursts_are_spelled_as_such() -> None:
    assert NAMES is not None
    server, scrapes = Server(), []
    with serving(server) as url:
        for i in range(120):
            server.each = 40 if i % 10 == 0 else 0
            scrapes.append(scrape(url)._replace(at=float(i)))
    found = Traffic.of(scrapes, NAMES)
    assert found.dispersion is not None and found.dispersion > 20
    assert replace(found, dispersion=9.0).spelled().startswith("gamma:cv=3,")
    assert replace(found, dispersion=9.0, engines=4).spelled().startswith("gamma:cv=1.73,"), (
        "a quarter of them, at random"
    )
    assert Traffic.of(scrapes[:30], NAMES).dispersion is None, "too few intervals"
    assert found.spelled().startswith("gamma:cv=") and parse_workload(found.spelled()).rate == pytest.approx(
        found.rate, rel=1e-3
    )


def counted(arrivals: Sequence[float], seconds: int, preempted: Sequence[float] = ()) -> list[Scrape]:
    """Scrapes, one each second, of a server that answers at once; ``preempted``: requests that wait again, of those running."""
    assert NAMES is not None
    found = []
    for at in range(seconds + 1):
        count = float(sum(one <= at for one in arrivals))
        again = preempted[at % len(preempted)] if preempted else 0.0
        samples = {
            NAMES.ended: count,
            f"{NAMES.ttft_seconds}_count": count,
            NAMES.running: 50 - again,
            NAMES.waiting: again,
        }
        samples[NAMES.preemptions] = at * (again > 0)
        for name in (NAMES.prompt_tokens, NAMES.output_tokens):
            samples[f"{name}_sum"] = 100 * count
        buckets = {name: {100.0: count} for name in (NAMES.prompt_tokens, NAMES.output_tokens)}
        found.append(Scrape(float(at), samples, buckets, {}))
    return found


@pytest.mark.parametrize(("rate", "cv"), [(2.0, 1.0), (4.0, 4.0), (20.0, 2.0)])
def test_the_burstiness_of_a_workload_is_found_again(rate: float, cv: float) -> None:
    assert NAMES is not None
    found = []
    for seed in range(5):
        load = parse_workload(f"gamma:cv={cv},rate={rate},prompt=100,output=100,length=1")
        traffic = Traffic.of(counted([one.time for one in load.arrivals(seed, duration=400)], 400), NAMES)
        assert traffic.dispersion is not None
        found.append(math.sqrt(traffic.dispersion))
    assert statistics.median(found) == pytest.approx(cv, rel=0.2)


def test_preempted_requests_are_no_arrivals() -> None:
    assert NAMES is not None
    even = [i / 4 for i in range(1, 401)]
    found = Traffic.of(counted(even, 100, preempted=(0, 20, 3, 12, 7)), NAMES)
    assert found.arrived == 400 and found.dispersion is not None and found.dispersion < 0.1


def test_requests_without_tokens_and_metrics_without_latencies() -> None:
    assert NAMES is not None
    scrapes = counted([i / 4 for i in range(1, 401)], 100)
    found = Traffic.of(scrapes, NAMES)
    said = list(cautions(found, profile().points[-1], (100.0, 100.0), elsewhere=""))
    assert said == [
        "warning: the server's metrics do not tell TPOT: the profile was not checked by it",
        "warning: the server's metrics do not tell TTFT: the profile was not checked by it",
    ]
    assert list(live(found, SLO(ttft_ms=100)))[-1].endswith("the metrics tell of no target of the SLO")
    for each in (0.0, math.nan):
        embeds = [s._replace(samples={**s.samples, f"{NAMES.output_tokens}_sum": each}) for s in scrapes]
        with pytest.raises(EvaluationError, match=r"its requests have 100 prompt and (0|nan) output tokens on average"):
            Traffic.of(embeds, NAMES)


def test_a_server_that_counts_no_number_of_requests() -> None:
    assert NAMES is not None
    scrapes = counted([i / 4 for i in range(1, 401)], 100)
    for name, wrong in ((NAMES.running, math.nan), (NAMES.ended, math.nan), (NAMES.waiting, math.inf)):
        odd = scrapes[-1]._replace(samples={**scrapes[-1].samples, name: wrong})
        with pytest.raises(EvaluationError, match=rf"(nan|inf|400) requests ended and {wrong} arrived in .* cannot be"):
            Traffic.of([*scrapes[:-1], odd], NAMES)


def test_too_little_traffic_and_a_server_that_was_started_anew() -> None:
    assert NAMES is not None
    with pytest.raises(
        EvaluationError, match=r"4 requests ended and 4 arrived in 1 s, and it takes 20 of each .*; --watch longer"
    ):
        Traffic.of(watched(Server(each=4), 2), NAMES)
    late, early = watched(Server(each=4), 40)[-1], watched(Server(each=4), 1)[0]
    again = watched(Server(each=4), 80)[-1]
    for scrapes in ([late, early], [late, early, again]):
        with pytest.raises(EvaluationError, match="started anew"):
            Traffic.of([one._replace(at=float(i)) for i, one in enumerate(scrapes)], NAMES)


@pytest.mark.parametrize("q", [0.1, 0.5, 0.9, 0.99])
def test_quantiles_and_scatter_are_as_exact_as_the_buckets(q: float) -> None:
    generator = random.Random(1)
    values = sorted(generator.lognormvariate(5.0, 1.0) for _ in range(4000))
    bounds = (0.0, *LENGTHS, math.inf)
    counts = [(high, float(sum(low < v <= high for v in values))) for low, high in pairwise(bounds)]
    histogram = Counted(tuple(counts), 4000.0, math.fsum(values))
    true = values[int(q * 4000)]
    upper = next(bound for bound in LENGTHS if bound >= true)
    assert histogram.quantile(q) <= upper and histogram.quantile(q) >= upper / 2.51
    assert histogram.variation == pytest.approx(statistics.pstdev(values) / statistics.fmean(values), rel=0.25)
    assert histogram.below(1000.0).low == histogram.below(1000.0).high == sum(v <= 1000 for v in values) / 4000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "cannot be read: Not Found"),
        (b"{", "holds no metrics of Prometheus"),
        (b"a 1\n", "it has no metrics of an engine"),
    ],
)
def test_a_server_that_says_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes, says: str
) -> None:
    save_profile(profiled(), tmp_path / "mine.yaml")

    class Other:
        def text(self) -> bytes:
            return text

    with serving(Other()) as url:
        assert run(["advise", url, str(tmp_path / "mine.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: URL is {url}; ") and says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["localhost:8000"], "URL is localhost:8000; it must begin with http:// or https://"),
        (["http://127.0.0.1:9"], "URL is http://127.0.0.1:9; http://127.0.0.1:9/metrics cannot be read: "),
        (["http://[::1"], "URL is http://[::1; http://[::1/metrics cannot be read: "),
        (["http://127.0.0.1:9", "--now", "token_budget=16384,speed=9"], '--now: "speed=9" sets no knob'),
        (["http://127.0.0.1:9", "--watch", "soon"], '--watch: "soon" is not a time'),
        (["http://127.0.0.1:9", "--now", "speed=9"], '--now: "speed=9" sets no knob'),
        (["http://127.0.0.1:9", "--slo", "tpot=50"], '--slo: "tpot=50" has no unit'),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    save_profile(profiled(), tmp_path / "mine.yaml")
    assert run(["advise", words[0], str(tmp_path / "mine.yaml"), *words[1:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {says}") and error.count("\n") == 1


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come by scrapes, so many that two of them suffice, however slow the machine is."""
    monkeypatch.setattr("autotune.cli.advise._INTERVAL_S", 0.05)
    save_profile(profiled(), tmp_path / "mine.yaml")
    words = [
        "--watch",
        "1s",
        "--seeds",
        "1",
        "--requests",
        "200",
        "--now",
        "max_batch_size=2,token_budget=64",
        "--json",
    ]
    with serving(Server(each=30)) as url:
        code = run(["advise", url, str(tmp_path / "mine.yaml"), *words])
    out = capsys.readouterr()
    found = json.loads(out.out)
    meets = any(one["attainment"] >= profiled().slo.attainment for one in found["settings"])
    assert (
        code == (0 if meets else 1)
        and found["live"]["ended"] >= 20
        and found["workload"].startswith(("poisson:", "gamma:"))
    )
    assert found["settings"][0]["label"] == "now"
    assert found["settings"][0]["knobs"]["max_batch_size"] == 2 and len(found["settings"]) > 1
    assert "live: of" in out.err and found["advice"]
    several = Server(each=30)
    several.running.labels("m", "1").set(3)
    with serving(several) as url:
        assert run(["advise", url, str(tmp_path / "mine.yaml"), *words]) in (0, 1)
    half = json.loads(capsys.readouterr().out)
    assert half["live"]["engines"] == 2
    assert [point["rate"] for point in half["settings"]] == pytest.approx(
        [half["live"]["rate"] / 2] * len(half["settings"])
    )
    with serving(Server(each=0)) as url:
        assert run(["advise", url, str(tmp_path / "mine.yaml"), *words]) == 1
    assert "nothing can be said: 0 requests ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            "Qwen/Qwen3-0.6B",
            "cpu-2core-qwen3-0.6b and h200-qwen3-0.6b are of Qwen/Qwen3-0.6B; name the one of its machine",
        ),
        (
            "me/mine",
            "no shipped profile is of me/mine; on its machine, autotune profile --engine vllm --model me/mine --out",
        ),
    ],
)
def test_a_profile_that_is_not_named_is_found_by_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, says: str
) -> None:
    monkeypatch.setattr("autotune.cli.advise._INTERVAL_S", 0.05)
    with serving(Server(model=model)) as url:
        assert run(["advise", url]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: PROFILE is not given, and {says}") and error.count("\n") == 1
    with serving(Server(each=4, model="meta-llama/Llama-3.1-8B")) as url:
        assert run(["advise", url, "--watch", "1s", "--seeds", "1", "--requests", "100"]) in (0, 1)
    assert "h100-llama-3.1-8b" in capsys.readouterr().out


def test_a_server_that_does_not_name_its_model_needs_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Server(model="")) as url:
        assert run(["advise", url]) == 2
    says = "error: PROFILE is not given, and the metrics do not name the model; name a PROFILE\n"
    assert capsys.readouterr().err == says


def test_a_scrape_that_fails_is_left_out_unless_it_is_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.cli.advise._INTERVAL_S", 0.05)
    save_profile(profiled(), tmp_path / "mine.yaml")

    class Flaky(Server):
        asked, dies = 0, False

        def text(self) -> bytes:
            self.asked += 1
            return b"" if 2 <= self.asked <= 4 or (self.dies and self.asked > 5) else super().text()

    words = [str(tmp_path / "mine.yaml"), "--watch", "1s", "--seeds", "1", "--requests", "200"]
    flaky = Flaky(each=6)
    with serving(flaky) as url:
        assert run(["advise", url, *words]) in (0, 1)
    assert "now: vLLM's defaults" in capsys.readouterr().out
    flaky.asked, flaky.dies = 0, True
    with serving(flaky) as url:
        assert run(["advise", url, *words]) == 2
    assert "cannot be read: Not Found" in capsys.readouterr().err


def test_what_is_said_of_it() -> None:
    assert NAMES is not None
    traffic = Traffic.of(watched(Server(each=4), 31), NAMES)
    now = profile().points[-1]
    first, second = live(traffic, SLO(ttft_ms=100, tpot_ms=50))
    assert first.startswith("live: 4 requests/s, dispersion 0; prompts ")
    assert second == "live: of 120 requests, TTFT within 100 ms: 0.0%; TPOT within 50 ms: 100.0%"
    lengths = traffic.prompt.mean, traffic.output.mean
    off = now.model_copy(update={"tpot_p50_ms": 99.0, "ttft_p50_ms": None})
    warned = list(cautions(traffic, off, lengths, elsewhere="other 1.0"))
    assert warned[0].startswith("warning: the profile was measured on other 1.0")
    assert "TPOT p50 is 99 ms simulated and 10 to 20 ms live" in warned[1]
    like = now.model_copy(update={"tpot_p50_ms": 25.0, "ttft_p50_ms": 1e3 * traffic.ttft.quantile(0.5)})
    assert list(cautions(traffic, like, lengths, elsewhere="")) == []
    (capped,) = cautions(traffic, like, (lengths[0] / 2, lengths[1]), elsewhere="")
    assert capped.startswith("warning: prompts of ") and "tokens on average were simulated" in capped
    (cached,) = cautions(replace(traffic, cached=0.4), like, lengths, elsewhere="")
    assert cached.startswith("warning: 40% of the prompt tokens were in the server's prefix cache")


def test_a_setting_that_meets_the_slo_goes_before_one_that_serves_more() -> None:
    slo = SLO(ttft_ms=100, attainment=0.9)
    points = [*profile().points]
    now, other = points[-1], max(points, key=lambda p: p.goodput.mean)

    def point(label: str, met: int, goodput: float) -> Point:
        spread = other.goodput.model_copy(update={"mean": goodput})
        found = {"label": label, "met": met, "offered": 100, "attainment": met / 100, "goodput": spread, "classes": {}}
        return other.model_copy(update=found)

    def said(*of: Point) -> list[str]:
        return list(advice(of, slo, (), lambda purpose: f"autotune export p --for {purpose}"))

    keep = ["Keep the settings it has: no other serves 2% more of this traffic within the SLO, simulated."]
    now = point("now", 95, 10.0)
    assert said(now, point("balanced", 96, 10.1)) == keep and said(now, point("balanced", 80, 12.0)) == keep
    assert said(now, point("interactive, balanced", 97, 11.0)) == [
        "At its next start, interactive, balanced: 10% more requests within the SLO than with the settings it has, simulated.",
        "  autotune export p --for interactive",
    ]
    assert said(point("now", 89, 10.0), point(EVERY_PURPOSE, 91, 10.1)) == [
        "At its next start, every purpose: it meets the SLO, and the settings it has do not, simulated.",
        "  autotune export p --for balanced",
    ]
    assert said(point("now", 0, 0.0), point("throughput", 5, 1.0))[0] == (
        "At its next start, throughput: with the settings it has no request is within the SLO, simulated."
    )
    assert said(point("now", 0, 0.0), point("throughput", 0, 0.0)) == [
        "No setting serves a request of this traffic within the SLO, simulated."
    ]


def test_the_command_that_is_printed_runs_and_writes_what_was_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has no wait window: settings are simulated without it, and their export says that it drops it."""
    monkeypatch.setattr("autotune.cli.advise._INTERVAL_S", 0.05)
    monkeypatch.chdir(tmp_path)
    measured = profiled()
    assert [setting.knobs.max_wait_ms for setting in measured.settings.values()] == [0, 0, 5]
    others = {name: setting for name, setting in measured.settings.items() if name == "throughput"}
    knobs = others["throughput"].knobs
    save_profile(measured.model_copy(update={"settings": others}), tmp_path / "waits.yaml")
    words = ["--watch", "1s", "--seeds", "1", "--requests", "200", "--slo", "tpot=30ms", "--json"]
    now = ["--now", "max_batch_size=1,token_budget=16"]
    with serving(Server(each=30)) as url:
        assert run(["advise", url, "waits.yaml", *words, *now]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert [one["label"] for one in found["settings"]] == ["now", "throughput"]
    assert Knobs(**found["settings"][1]["knobs"]) == knobs.with_(max_wait_ms=0)
    assert "note: throughput is simulated without max_wait_ms: vLLM has no such setting" in found["advice"]
    program, *exporting = shlex.split(found["advice"][-1])
    assert program == "autotune" and run(exporting) == 0
    written = yaml.safe_load((tmp_path / "vllm.yaml").read_text(encoding="utf-8"))
    assert written["max-num-seqs"] == knobs.max_batch_size


def test_settings_that_differ_in_what_is_left_out_are_one() -> None:
    waits = Knobs(max_batch_size=32, max_wait_ms=5, token_budget=256, chunk_size=256)
    measured = profiled()
    balanced = measured.settings["balanced"]
    others = {"balanced": balanced, "throughput": balanced.model_copy(update={"knobs": waits})}
    measured = measured.model_copy(update={"settings": others})
    dropped = without_counterpart(measured, TARGETS["vllm"])
    assert dropped == {"balanced": [], "throughput": ["max_wait_ms"]}
    assert by_knobs(startable(measured, dropped)) == {"balanced, throughput": balanced.knobs}


def test_what_is_advised_can_be_exported_for_each_engine_with_metrics() -> None:
    named = {name for name in _ENGINES if engine_named(name).metrics is not None}
    assert named and named <= TARGETS.keys()


def test_only_an_engine_with_metrics_of_its_own_is_found_by_them() -> None:
    assert NAMES is not None
    found = engine_of_metrics({NAMES.running: 1.0})
    assert found is not None and found.name == "vllm" and engine_of_metrics({"up": 1.0}) is None


def test_a_url_is_named() -> None:
    with pytest.raises(InputError, match="URL is ftp://x; it must begin with http"):
        scrape("ftp://x")
