"""Tables take the form there is room for: nothing of them is cut, and nothing is left out that there is room for."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from autotune.cli.main import run
from autotune.measure.score import Latency
from autotune.profile import Profile, load_profile, save_profile, shipped_profiles
from autotune.profile.parts import ClassPoint
from autotune.profiling.points import point as pooled
from autotune.report import profile_table as profiled_tables
from autotune.report.simulation_tables import capacity_table, offered_sentence, simulated_table
from autotune.report.tables import Detail, class_table, columns, empty_table, fullest, latency, turned
from autotune.report.wording import percent, plus_minus
from autotune.simulate.capacity import SeedCapacity, SettingCapacity
from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.slo import SLO, RequestClass
from tests.sample_profile import sample_point
from tests.unit.profiles import SMALL, VLLM, findings, profile, score
from tests.unit.profiles import run as measured
from tests.unit.simulated_profile import EVEN, profiled

WIDTHS = (80, 90, 100, 110, 112, 120, 125, 130, 140, 150, 160)
LARGEST = Knobs(**{spec.name: getattr(KnobLimits(), spec.name) for spec in KNOBS}).with_(max_wait_ms=12.5)
PRICES = (None, 2.5)
TARGET = SLO(ttft_ms=500, tpot_ms=50)


def shown(drawn: Table, width: int) -> str:
    """What a terminal of ``width`` columns shows of it, as the verbs print it."""
    console = Console(width=width, file=StringIO(), record=True)
    console.print(drawn, soft_wrap=True)
    text = console.export_text()
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    return text


def sluggish(price: float | None = None) -> Profile:
    """Of large figures."""
    times = {"ttft_ms": Latency(p50=1111, p99=22222), "tpot_ms": Latency(p50=111, p99=2222)}
    slow: dict[str, Any] = times | {"throughput": 12345.0}
    return profile(
        findings(measured(LARGEST, 40, **slow), measured(VLLM, 20, **slow), measured(SMALL, 30)), price=price
    )


def capacities(*labels: str) -> list[SettingCapacity]:
    times: dict[str, Any] = {"ttft_ms": Latency(p50=9876, p99=12345), "tpot_ms": Latency(p50=987, p99=1234)}
    seeds = tuple(
        SeedCapacity(seed, rate, 1.01 * rate, score(LARGEST, offered_rate=rate, **times), 7, 100_000.0)
        for seed, rate in enumerate((0.123, 0.0987, 0.145))
    )
    return [SettingCapacity(label, LARGEST, seeds) for label in labels]


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("width", WIDTHS)
def test_what_a_profile_found_is_never_cut(width: int, price: float | None) -> None:
    profiles = [sluggish(price)]
    profiles += [
        load_profile(file).model_copy(update={"price_per_hour": price}) for file in shipped_profiles().values()
    ]
    for made in profiles:
        text = shown(profiled_tables.table(made, width), width)
        rows = profiled_tables.rows(made)
        assert "…" not in text
        assert text.count("\n") == 1 + len(rows) + sum(len(turned(point.knobs)) for _, point, _ in rows)
        assert all(word in text for word in ("budget", "TTFT p99", "TPOT p99", "vLLM defaults"))
        assert ("attainment" in text) != (" met " in text)
        assert "←" in text or width < 90
        assert ("per M tok" in text) == (price is not None)
        assert ("tok/s" in text and "← recommended" in text) or width < 130


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("width", WIDTHS)
def test_what_was_simulated_is_never_cut(width: int, price: float | None) -> None:
    found = [
        p.model_copy(update={"label": label, "seeds": (1, 2)})
        for p in sluggish().points
        for label in ("interactive, balanced", "requested")
    ]
    text = shown(simulated_table(found, TARGET, price, width), width)
    assert "…" not in text
    for words in ("interactive,", "chunk", "goodput", "TTFT p99", "TPOT p99", "22.22 s", "8192"):
        assert words in text
    assert "100.0% (91.2–100.0)" in text or width < (120 if price else 110)
    assert ("/M tokens" in text) == (price is not None)
    assert ("TTFT p50" in text) == ("preempted" in text)
    assert "TTFT p50" in text or width < (150 if price else 140)


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("width", WIDTHS)
def test_capacities_are_never_cut(width: int, price: float | None) -> None:
    found = capacities("interactive, balanced", "TensorRT-LLM defaults", "vLLM defaults, small GPU")
    text = shown(capacity_table(found[:2], found[2], price, width), width)
    assert "…" not in text
    for words in ("TensorRT-LLM", "capacity,", "req/s", "TTFT p99", "12.35 s", "1.23 s", "0.122", "small GPU"):
        assert words in text
    assert "0.122 (0.0647–0.18)" in text or width < (100 if price else 90)
    assert ("at capacity" in text) == (price is not None)
    assert "running" in text or width < (130 if price else 110)


def test_what_one_seed_tells_has_no_interval() -> None:
    """Nor have seeds that bring the same requests."""
    one = sluggish().points[0]
    two = one.model_copy(update={"seeds": (1, 2)})
    assert "100.0% (91.2–100.0)" in shown(simulated_table([two], TARGET, None, 160), 160)
    assert "(91.2" not in shown(simulated_table([one], TARGET, None, 160), 160)
    assert "(91.2" not in shown(simulated_table([two], TARGET, None, 160, repeated=True), 160)
    assert offered_sentence(10.0, [two], repeated=0).endswith(
        "40 requests under 2 seeds. ( ) is a 95% interval over 2 seeds; over requests where all or none met the SLO."
    )
    some = two.model_copy(update={"met": 39})
    assert offered_sentence(10.0, [some], repeated=0).endswith("under 2 seeds. ( ) is a 95% interval over 2 seeds.")
    assert offered_sentence(10.0, [one], repeated=0).endswith("40 requests under 1 seed.")


def test_what_misses_its_target_is_not_shown_to_meet_it() -> None:
    """Nor is anything shown to have met all where it did not."""
    missed = pooled([measured(SMALL, 296, offered=299)])
    for point in (missed, missed.model_copy(update={"attainment": 0.99})):  # a profile of before has it rounded
        assert "98.997%" in shown(simulated_table([point], TARGET, None, 160), 160)
    met = pooled([measured(SMALL, 3999, offered=4000)])
    assert "99.98%" in shown(simulated_table([met], TARGET, None, 160), 160)
    made = profile(findings(measured(SMALL, 296, offered=299), measured(VLLM, 250, offered=299)))
    assert "98.997% (" in shown(profiled_tables.table(made, 160), 160)
    better = profile(findings(measured(SMALL, 296, offered=299), measured(VLLM, 250, offered=299)), gain=None)
    assert "98.997% (" in profiled_tables.conclusion(better)
    assert (percent(296 / 299), percent(296 / 299, target=0.99), percent(3999 / 4000)) == ("99.0%", "98.997%", "99.98%")
    assert (percent(0.99961), percent(0.9996, 0), percent(0.71), percent(1.0)) == ("99.96%", "100%", "71%", "100%")


def test_an_interval_wider_than_the_goodput_itself_is_not_shown() -> None:
    """As Student's t over two seconds has; of profiles of before, too."""
    some = findings(measured(SMALL, 20, blocks=[(20, 19), (20, 1)]), measured(VLLM, 20, blocks=[(20, 10), (20, 10)]))
    wide, narrow = profile(some), profile(findings(measured(SMALL, 40), measured(VLLM, 20)))
    assert wide.points[0].goodput.half is None and wide.points[1].goodput.half == 0
    assert plus_minus(wide.points[0]) == "5.00" and plus_minus(wide.points[1]).startswith("5.00 ± ")
    for made, count in ((wide, 1), (narrow, 2)):
        assert shown(profiled_tables.table(made, 160), 160).count(" ± ") == count
        console = Console(width=160, file=StringIO(), record=True)
        profiled_tables.show(made, console)
        text = " ".join(console.export_text().split())
        assert (", where too few met it there is no ±; wait in ms" in text) == (made is wide)
        console = Console(width=60, file=StringIO(), record=True)  # which has no room for any ±
        profiled_tables.show(made, console)
        text = " ".join(console.export_text().split())
        assert " ± 0" not in text and "p99 of so few" in text and "where too few met it" not in text


def test_weights_are_said_where_goodput_counts_by_them() -> None:
    one = sluggish().points[0]
    by_weight = "In goodput, each request counts by the weight of its class."
    seen = ClassPoint(
        weight=0.5, offered=40, met=40, attainment=1.0, throughput=1.0, ttft_p99_ms=None, tpot_p99_ms=None, e2e_p99_ms=None
    )  # fmt: skip
    weighed = one.model_copy(update={"classes": {"chat": seen}})
    assert offered_sentence(10.0, [weighed], repeated=0).endswith(f"40 requests under 1 seed. {by_weight}")
    assert by_weight not in offered_sentence(10.0, [one], repeated=0)


def test_the_rate_offered_is_the_one_that_came() -> None:
    """In 4 s, at a nominal 10 req/s, 39 requests came, or 39 to 42 under other seeds."""
    for others, said in ((39, "of 9.75 req/s offered to every setting alike;"), (42, "of 9.75 to 10.5 req/s offered;")):
        made = profile(findings(measured(SMALL, 39, offered=39), measured(VLLM, 20, offered=others)))
        console = Console(width=160, file=StringIO(), record=True)
        profiled_tables.show(made, console)
        assert f"those that met the SLO, {said}" in " ".join(console.export_text().split())


def test_what_has_no_target_goes_last() -> None:
    points = sluggish().points
    bare = shown(simulated_table(points, SLO(e2e_ms=5000), 2.5, 40), 80)
    assert "E2E p99" in bare and "TTFT" not in bare and "TPOT" not in bare and "tok/s" not in bare
    assert "tok/s" in shown(simulated_table(points, SLO(e2e_ms=5000), None, 40), 80)


def test_the_fullest_form_that_fits_is_taken() -> None:
    drawn: list[Detail] = []

    def draw(detail: Detail) -> Table:
        drawn.append(detail)
        made = empty_table(detail)
        made.add_column("x" * (70 - 10 * detail))
        made.add_row(":" * 3)
        return made

    assert columns(draw(Detail.ALL)) == 70
    for width, detail in (
        (200, Detail.ALL),
        (70, Detail.ALL),
        (69, Detail.ALL_CLOSE),
        (30, Detail.SHORT),
        (3, Detail.BAREST),
    ):
        drawn.clear()
        assert columns(fullest(draw, width)) == 70 - 10 * detail and drawn[-1] == detail


@pytest.mark.parametrize("price", [(), pytest.param(("--price", "2.5/h"), marks=pytest.mark.slow)])
def test_verbs_draw_for_the_terminal_they_are_on(
    price: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    save_profile(profiled(), tmp_path / "h200.yaml")
    of, quick = str(tmp_path / "h200.yaml"), ("--workload", EVEN, "--requests", "50", "--seeds", "2", *price)
    for words in (["show", of, *price], ["simulate", "--profile", of, "--rate", "5", *quick], ["capacity", of, *quick]):
        run(words)
        out = capsys.readouterr().out
        assert "\x1b[" in out and "TTFT p99" in out and "…" not in out


def test_only_of_a_replayed_trace_are_requests_said_to_be_the_same(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,5,1\n2,6,1\n")
    for spec, said in (
        ("azure-conv:length=1/8", ""),
        (f"azure-conv:{trace}", "(a trace brings the same requests under every seed)"),
        (f"azure-conv:{trace},bin=1", "(a trace brings the same requests under every seed)"),
        (f"a={trace}@0.3+b=poisson@0.7", "(a trace brings the same 30% of the requests under every seed)"),
        (f"{trace}x", ""),
    ):
        load = profile().workload.model_copy(update={"spec": spec, "validation_seeds": (1, 2)})
        console = Console(width=160, file=StringIO(), record=True)
        profiled_tables.show(profile(workload=load), console)
        text = " ".join(console.export_text().split())
        assert said in text and ("(a trace brings" in text) == bool(said)


@pytest.mark.parametrize("name", ["chat[eu]", "[/x]", "@chat"])
def test_the_name_of_a_class_is_no_markup(name: str) -> None:
    seen = ClassPoint(
        weight=1.0,
        offered=100,
        met=50,
        attainment=0.5,
        throughput=10.0,
        ttft_p99_ms=1.0,
        tpot_p99_ms=1.0,
        e2e_p99_ms=1.0,
    )
    points = [
        (label, sample_point(SMALL, label).model_copy(update={"classes": {name: seen}})) for label in ("one", "[b]")
    ]
    drawn = class_table(points, TARGET, [RequestClass(name, TARGET)])
    assert drawn is not None
    first, second = shown(drawn, 120).splitlines()[1:]
    assert first.split()[:4] == ["one", name, "50.0%", "99%"] and second.split()[:2] == ["[b]", name]


def test_a_class_without_a_request_has_no_attainment() -> None:
    none = ClassPoint(
        weight=1.0, offered=0, met=0, attainment=0.0, throughput=0.0, ttft_p99_ms=None, tpot_p99_ms=None, e2e_p99_ms=None
    )  # fmt: skip
    point = sample_point(SMALL, "one").model_copy(update={"classes": {"chat": none}})
    drawn = class_table([("one", point)], TARGET, [RequestClass("chat", TARGET)])
    assert drawn is not None
    assert shown(drawn, 120).splitlines()[1].split() == ["one", "chat", "–", "99%", "0", "1", "0", "–", "–", "–"]


@pytest.mark.parametrize(
    ("ms", "text"), [(None, "–"), (0.63, "0.6 ms"), (217.4, "217 ms"), (18912.3, "18.91 s"), (999.7, "1000 ms")]
)
def test_latencies_in_words(ms: float | None, text: str) -> None:
    assert latency(ms) == text
