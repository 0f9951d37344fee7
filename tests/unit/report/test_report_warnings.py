"""What a report says of figures that are far off, missing or unreliable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from autotune.cost.model import CostModel
from autotune.measure.score import Latency
from autotune.profile import Capacity, Point, Profile, Spread, load_profile
from autotune.report import Evidence, compose, gather, html
from autotune.report import profile_table as table
from autotune.report.headline import headline
from autotune.report.panels import capacity, latency, paired, pareto, sensitivity, steps
from autotune.report.wording import number, off
from autotune.simulate.sensitivity import Sensitivity, one_at_a_time
from runtime.knobs import Knobs
from runtime.slo import SLO
from tests.sample_profile import sample_profile
from tests.unit.report.reporting import Page, changed, section

ROOT = Path(__file__).parents[3]


def slower(evidence: Evidence, speed: float) -> Profile:
    """The profile with a cost model that is ``speed`` times as fast in everything."""
    facts = evidence.profile.cost_model
    assert facts is not None
    return changed(evidence, cost_model=CostModel(facts).scaled(compute=speed, bandwidth=speed, overhead=speed).facts)


def test_a_simulation_where_nothing_meets_the_slo_says_nothing_of_knobs(evidence: Evidence) -> None:
    found = replace(evidence, profile=slower(evidence, 0.1))
    swept = one_at_a_time(found.profile, found.recommended.knobs, found.recommended.point.rate)
    assert swept is not None and {s.goodput for values in swept.by_knob.values() for _, s in values} == {0.0}
    made = sensitivity.section(found, swept)
    assert made.title.startswith("At this rate no simulated request meets the SLO") and made.plots
    for plot in made.plots:
        assert max(y for view in plot.views for trace in view.data for y in trace["y"]) > 0, "a plot that is flat at 0"
    bare = replace(found, runs=())
    bare = replace(bare, profile=bare.profile.model_copy(update={"simulated": ()}))
    assert (
        without := sensitivity.section(bare, swept)
    ).absent is not None and "no simulated request meets" in without.absent
    here = found.recommended.knobs.as_dict()
    elsewhere = {
        name: [(v, s if s.setting == here else s.model_copy(update={"goodput": 5.0})) for v, s in values]
        for name, values in swept.by_knob.items()
    }
    at_choice = sensitivity.section(found, Sensitivity(elsewhere, 100, True))
    assert "No simulated request meets the SLO at the choice itself" in at_choice.title


@pytest.mark.slow
def test_knobs_are_turned_at_the_speed_the_machine_served_at(evidence: Evidence) -> None:
    slow, facts, chosen = slower(evidence, 0.1), evidence.profile.simulation, evidence.recommended
    assert facts is not None
    served = slow.model_copy(update={"simulation": facts.model_copy(update={"speed": 10.0})})
    found = [one_at_a_time(profile, chosen.knobs, chosen.point.rate) for profile in (served, evidence.profile)]
    corrected, fitted = ([s.goodput for values in each.by_knob.values() for _, s in values] for each in found if each)
    assert max(corrected) > 0 and corrected == pytest.approx(fitted, rel=0.05)


def test_titles_warn_of_figures_that_are_far_off(evidence: Evidence) -> None:
    assert (
        off("Modelled step times", 0.021, 0.08)
        == "Modelled step times are typically off by 2.1% (median), at worst by 8.0%"
    )
    warned = off("Simulated goodput figures", 0.9, 2.8)
    assert (
        warned
        == "Simulated goodput figures are not to be relied on: typically off by 90% (median), at worst by a factor of 3.8"
    )
    far = tuple(
        p.model_copy(update={"goodput": Spread(mean=0.1 * p.goodput.mean, low=0, high=1, runs=(0.1,))})
        for p in evidence.profile.simulated
    )
    made = paired.section(replace(evidence, profile=evidence.profile.model_copy(update={"simulated": far})))
    assert "not to be relied on: typically off by 9" in made.title and "within" not in made.title
    wrong = replace(
        evidence,
        profile=changed(evidence, cost_model=None),
        steps=tuple(
            s.model_copy(update={"predicted": (1.4 if n else 3.8) * s.seconds}) for n, s in enumerate(evidence.steps)
        ),
    )
    title = steps.section(wrong).title
    assert "not to be relied on: typically off by 40% (median), at worst by a factor of 3.8" in title


def test_what_the_comparison_left_is_not_mixed_with_it(evidence: Evidence) -> None:
    def left(at: Evidence, rate: float, most: float) -> Evidence:
        """With the best pair again at ``rate``, where the simulation says ``most`` times what was measured."""
        knobs = evidence.recommended.knobs
        measured = next(p for p in evidence.compared if p.knobs == knobs).model_copy(update={"rate": rate})
        goodput = Spread(mean=most * measured.goodput.mean, low=0, high=99, runs=(1.0,))
        simulation = measured.model_copy(update={"stage": "simulation", "label": "paired", "goodput": goodput})
        points, simulated = (*at.profile.points, measured), (*at.profile.simulated, simulation)
        return replace(at, profile=at.profile.model_copy(update={"points": points, "simulated": simulated}))

    plain = paired.section(evidence)
    assert "the rate compared" not in plain.title and "left" not in plain.lead
    once = left(evidence, 39.2, 2.31)
    made = paired.section(once)
    assert (
        made.title
        == f"{plain.title}, at the rate compared; by a factor of 2.31 at 39.2 req/s, before the speed was fitted"
    )
    assert f"over the {len(evidence.pairs())} settings" in made.lead and "left 39.2 req/s once it knew" in made.lead
    assert [p.title for p in made.plots] == [p.title for p in plain.plots], (
        "titles of plots are of the rate compared too"
    )
    assert len(made.plots[0].views[0].data[1]["x"]) == len(evidence.pairs()) + 1, "it is shown all the same"
    twice = paired.section(left(once, 32.4, 1.01)).title
    assert twice.endswith("; by up to a factor of 2.31 at 32.4 and 39.2 req/s, before the speed was fitted")


def test_the_title_says_the_error_that_the_profile_has() -> None:
    for file in sorted((ROOT / "profiles").rglob("*.yaml")):
        profile = load_profile(file)
        title = paired.section(Evidence(profile, file.name)).title
        assert profile.simulation is not None and f"off by {profile.simulation.goodput_error:.1%} (median)" in title


def test_a_rate_missed_below_the_one_that_was_met_is_said(evidence: Evidence) -> None:
    found = evidence.profile.capacity
    assert found is not None and found.rate is not None
    low = min(found.tried, key=lambda p: p.rate)
    worse = low.model_copy(update={"met": 0, "attainment": 0.0, "attainment_low": 0.0})
    tried = tuple(worse if p is low else p for p in found.tried)
    top = max(p.rate for p in tried)
    profile = evidence.profile.model_copy(
        update={"capacity": Capacity(knobs=found.knobs, rate=top, tried=tried), "slo_met": True}
    )
    unreliable = replace(evidence, profile=profile)
    title, missed = capacity.section(unreliable).title, number(low.offered_rate)
    assert "up to" not in title and missed in title and "not certain" in title
    head = headline(unreliable)
    assert head.tone == "unsure" and f"missed at {missed}" in head.status


def test_a_limit_that_too_few_requests_tell_of_is_not_stated(evidence: Evidence) -> None:
    found = evidence.profile.capacity
    assert found is not None and evidence.profile.slo.attainment == 0.99
    top = max(found.tried, key=lambda p: p.offered_rate)

    low = top.model_copy(update={"offered_rate": 0.1, "rate": 0.1, "met": top.offered, "attainment": 1.0})

    def of(offered: int, met: int) -> Evidence:
        share = {
            "offered": offered,
            "met": met,
            "attainment": met / offered,
            "attainment_low": 0.0,
            "attainment_high": 1.0,
        }
        only = top.model_copy(update=share)
        capacities = Capacity(knobs=found.knobs, rate=top.rate, tried=(only, low))
        return replace(evidence, profile=evidence.profile.model_copy(update={"capacity": capacities, "slo_met": True}))

    sure, rate = headline(of(400, 399)), number(top.offered_rate)
    assert (sure.status, sure.tone) == (f"SLO met up to {rate} req/s", "good")
    for offered, met in ((14, 14), (400, 394)):  # too few, and fewer than the target though not refuted
        few = of(offered, met)
        assert headline(few).tone == "unsure" and headline(few).status.startswith(f"SLO perhaps met up to {rate} req/s")
        assert "perhaps" in capacity.section(few).title


def test_warnings_stand_in_the_headline(evidence: Evidence) -> None:
    class Warned(Profile):
        warnings: tuple[str, ...] = ()

    warned = Warned(
        **{name: getattr(evidence.profile, name) for name in Profile.model_fields if name != "warnings"}
        | {"cost_model": None, "warnings": ("the <machine> was busy",)}
    )
    made = compose(replace(evidence, profile=warned))
    assert made.headline.warnings == ("The <machine> was busy.",)
    words = "".join(Page(html(made)).words)
    assert words.index("The <machine> was busy.") < words.index(made.headline.meaning[0])
    console = Console(width=120, record=True, file=StringIO())
    table.show(warned, console)
    assert "The <machine> was busy." in console.export_text()
    assert headline(evidence).warnings == ()


# -- profiles that lack things ------------------------------------------------------------------------------------------


def test_an_older_profile_says_what_it_lacks() -> None:
    file = ROOT / "profiles" / "cpu-2core-tiny.yaml"
    profile = changed(
        Evidence(load_profile(file), file.name), cost_model=None, simulated=(), simulation=None, confidence=None
    )
    made = compose(gather(profile, Path("nowhere") / file.name))
    absent = {s.key: s.absent for s in made.sections if s.absent is not None}
    assert set(absent) >= {"latency", "paired", "steps"}
    assert all(why.endswith(".") and why.count(". ") <= 1 for why in absent.values())
    assert section(made, "pareto").plots and section(made, "capacity").plots
    assert "not worked out" in made.headline.sure
    Page(html(made))


def test_a_run_stopped_in_the_search(evidence: Evidence) -> None:
    found = [p.model_copy(update={"stage": "search", "seeds": (0,)}) for p in evidence.compared]
    best = evidence.recommended.model_copy(
        update={"point": next(p for p in found if p.knobs == evidence.recommended.knobs)}
    )
    profile = changed(
        evidence, status="stopped", points=tuple(found), settings={"balanced": best}, capacity=None, baseline=None,
        confidence=None, simulated=(), cost_model=None, simulation=None, verdict="stopped before the end", slo_met=True,
    )  # fmt: skip
    made = compose(Evidence(profile, "p.yaml"))
    assert made.headline.status == "SLO not missed so far (run stopped early)" and made.headline.tone == "unsure"
    assert "Not validated" in made.headline.sure
    assert {s.key for s in made.sections if s.absent} >= {"capacity", "paired", "steps", "latency"}
    Page(html(made))


def test_a_run_stopped_in_the_simulation_claims_nothing_measured(evidence: Evidence) -> None:
    simulated = {p.knobs: p.model_copy(update={"stage": "simulation"}) for p in evidence.compared}
    best = evidence.recommended.model_copy(update={"point": simulated[evidence.recommended.knobs]})
    base = evidence.profile.baseline
    assert base is not None
    cpu = evidence.profile.machine.model_copy(update={"kind": "cpu", "gpu": None, "cores": 1, "cpu": "AMD EPYC"})
    runs = tuple(r.model_copy(update={"stage": "simulation"}) for r in evidence.runs if r.stage == "validation")
    profile = changed(
        evidence, status="stopped", points=(), settings={"balanced": best}, capacity=None, baseline=simulated[base.knobs],
        confidence=None, simulated=tuple(simulated.values()), machine=cpu, verdict="stopped early", slo_met=True,
        cost_model=None,
    )  # fmt: skip
    made = compose(replace(evidence, profile=profile, runs=runs))
    head = made.headline
    assert head.title.startswith("By simulation alone (nothing was measured): ")
    assert head.status == "simulated, nothing was measured (run stopped early)" and head.tone == "unsure"
    assert head.meaning[0].startswith("By simulation alone (nothing was measured): with the recommended setting, ")
    assert " on 1 core of AMD EPYC would answer " in head.meaning[0]
    assert head.sure == "Nothing was measured: the choice rests on simulation alone."
    assert {figure.tone for figure in head.figures} <= {"", "unsure"}
    assert section(made, "pareto").title.startswith("Best by simulation: ")
    drawn = section(made, "latency")
    assert drawn.title.startswith("By simulation, ") and "simulated requests" in drawn.lead
    page = html(made)
    assert "What they give by simulation" in page and "What they gave" not in page
    assert str(table.cheapest(profile)).startswith("by simulation, ")
    alone = changed(replace(evidence, profile=profile), baseline=None)
    assert "no baseline was simulated beside it" in headline(replace(evidence, profile=alone)).meaning[0]


@pytest.mark.parametrize(
    ("slo", "drawn", "tiles"),
    [
        ("ttft=1s,itl=60ms", ["TTFT"], ["TTFT p99", "ITL p99"]),
        ("tpot=40ms,itl=60ms", ["TPOT"], ["TPOT p99", "ITL p99"]),
        ("itl=60ms", [], ["ITL p99"]),
    ],
)
def test_a_target_on_gaps_is_not_held_against_their_mean(
    evidence: Evidence, slo: str, drawn: list[str], tiles: list[str]
) -> None:
    found = replace(evidence, profile=changed(evidence, slo=SLO.parse(slo)))
    shown = {f.name: f for f in headline(found).figures if f.name.endswith("p99")}
    assert [*shown] == tiles
    itl = shown["ITL p99"]
    assert (itl.value, itl.beside, itl.tone) == ("–", "target 60 ms; profiles do not keep the ITL", "")
    against = pareto.section(found)
    assert [view.name for plot in against.plots for view in plot.views] == drawn
    assert "ITL" in f"{against.notes}{against.absent}"
    assert "ITL" not in latency.section(found).title


def of_one_token(evidence: Evidence, slo: str) -> Evidence:
    """The same, but every answer is one token, which has no TPOT."""
    nothing = {"tpot_p50_ms": None, "tpot_p99_ms": None}

    def without(points: Iterable[Point]) -> tuple[Point, ...]:
        return tuple(p.model_copy(update=nothing) for p in points)

    settings = {
        name: s.model_copy(update={"point": s.point.model_copy(update=nothing)})
        for name, s in evidence.profile.settings.items()
    }
    profile = changed(
        evidence, slo=SLO.parse(slo), settings=settings, points=without(evidence.profile.points),
        simulated=without(evidence.profile.simulated), baseline=None,
    )  # fmt: skip
    none = Latency(p50=None, p99=None)
    runs = tuple(r.model_copy(update={"score": r.score.model_copy(update={"tpot_ms": none})}) for r in evidence.runs)
    return replace(evidence, profile=profile, runs=runs)


def test_a_target_on_what_no_request_has_is_not_missed(evidence: Evidence) -> None:
    found = of_one_token(evidence, "ttft=1s,tpot=40ms")
    tpot = next(f for f in headline(found).figures if f.name == "TPOT p99")
    assert (tpot.value, tpot.beside, tpot.tone) == ("–", "target 40 ms, no request has one", "")
    Page(html(compose(found)))


def test_what_no_request_has_is_not_in_the_picture(evidence: Evidence) -> None:
    against = pareto.section(of_one_token(evidence, "ttft=1s,tpot=40ms"))
    assert [view.name for plot in against.plots for view in plot.views] == ["TTFT"]
    plain = pareto.section(replace(evidence, profile=changed(evidence, slo=SLO.parse("ttft=1s"))))
    assert against.notes == plain.notes, "nothing more is outside the picture"
    alone = pareto.section(of_one_token(evidence, "tpot=40ms"))
    assert alone.absent == "No request has a latency that the SLO bounds."


def test_a_target_is_missed_where_nothing_finished(evidence: Evidence) -> None:
    chosen = evidence.recommended
    nothing = dict.fromkeys(("ttft_p99_ms", "tpot_p99_ms", "e2e_p99_ms"))
    point = chosen.point.model_copy(update=nothing)
    profile = changed(evidence, settings={"balanced": chosen.model_copy(update={"point": point})})
    shown = {f.name: f for f in headline(replace(evidence, profile=profile)).figures}
    assert (shown["TPOT p99"].beside, shown["TPOT p99"].tone) == ("target 40 ms, nothing finished", "bad")


def test_a_profile_of_one_point() -> None:
    one = sample_profile({"interactive": Knobs()})
    made = compose(Evidence(one, "p.yaml"))
    assert section(made, "pareto").absent and section(made, "sensitivity").absent
    Page(html(made))


@pytest.mark.parametrize(
    ("rate_from", "status", "says"),
    [
        ("user", "complete", "Only one rate was tried, as requested, so there is no curve to show."),
        ("calibration", "complete", "Only one rate was tried, so there is no curve to show."),
        ("calibration", "stopped", "Only one rate was tried before the run was stopped, so there is no curve to show."),
    ],
)
def test_why_there_is_no_curve_is_said_only_where_it_is_known(
    evidence: Evidence, rate_from: str, status: str, says: str
) -> None:
    whole = evidence.profile.capacity
    assert whole is not None
    load = evidence.profile.workload.model_copy(update={"rate_from": rate_from})
    one = Capacity(knobs=whole.knobs, rate=None, tried=whole.tried[:1])
    found = replace(evidence, profile=changed(evidence, workload=load, status=status, capacity=one))
    assert capacity.section(found).absent == says


def test_an_slo_that_is_not_met_is_said_first(evidence: Evidence) -> None:
    none = evidence.profile.capacity
    assert none is not None
    capacity = Capacity(knobs=none.knobs, rate=None, tried=none.tried)
    made = compose(Evidence(changed(evidence, slo_met=False, capacity=capacity, cost_model=None), "p.yaml"))
    assert made.headline.status == "SLO not met" and made.headline.tone == "bad"
    assert section(made, "capacity").title == "The SLO was not met at any rate tried"
