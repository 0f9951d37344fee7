"""Rivals of the controllers' benchmark: what their sources say, to the number, and how their constants are found."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.control.controllers.aimd import AimdController
from autotune.control.controllers.bisection import BisectionController
from autotune.control.controllers.gradient import GradientController
from autotune.control.controllers.parts.tiles import whole_tiles
from benchmarks.controller import constants, contenders, known, tune
from benchmarks.controller.constants import RANGES, constants_of
from benchmarks.controller.contenders import CONTENDERS, POLICIES, RIVALS, driver_of
from benchmarks.controller.rivals import Niyama, PPas
from benchmarks.controller.run import FCFS, Bench, Outcome, run
from benchmarks.controller.scenarios import ANSWERS, COLD, FROZEN, MATRIX, MEASURED
from benchmarks.controller.tune import Round, Search, Trial, candidates_of
from runtime.knobs import KnobLimits
from runtime.records import LimitedBy, StepRecord
from runtime.request import Request, SamplingParams
from runtime.slo import SLO
from runtime.tunable import SchedulerView
from tests.unit.test_controller_benchmark import RATES, SHORT

LIMITS = KnobLimits(2048, 1000, 8192, 8192)


def view(
    decoding: int = 10, waiting: int = 0, prefilling: int = 0, slack: float = math.inf, free: int = 40_000
) -> SchedulerView:
    return SchedulerView(
        0.0, decoding, prefilling, waiting, 500 * waiting, 500 * prefilling, 500 * decoding, free, 47_500, 0.0, slack, slack,
        COLD, 0, LIMITS,
    )  # fmt: skip


def step(decodes: int, prompt: int, base: float = 5e-3) -> StepRecord:
    """A machine on which a step takes 5 ms (``base``), and 10 µs more for each prompt token."""
    return StepRecord(
        0.0, base + 1e-5 * prompt, 1, decodes, 0, int(prompt > 0), prompt, prompt, 0, decodes, decodes, 0, 0, 100, 0, 0, 8192,
        LimitedBy.BUDGET,
    )  # fmt: skip


class TestPPas:
    def test_the_cap_holds_while_two_prompts_are_pending_and_something_decodes(self) -> None:
        made = PPas(COLD)
        assert made.budget(view(waiting=1, prefilling=1)) == made.budget(view(waiting=2)) == 2048
        assert made.budget(view(waiting=1)) == made.budget(view(decoding=0, waiting=5)) == 8192
        assert PPas(COLD, cap=64).budget(view(decoding=100, prefilling=3)) == 100, "decodes are not held back"
        assert made.decide(0.0, COLD, LIMITS).knobs == COLD

    @pytest.mark.parametrize("cap", [0, -1, 2.5, True])
    def test_a_cap_is_a_number_of_tokens(self, cap: Any) -> None:
        with pytest.raises(ValueError, match=f"cap is {cap}"):
            PPas(COLD, cap=cap)


def learned(**more: Any) -> Niyama:
    made = Niyama(COLD, **more)
    dice = random.Random(3)
    for _ in range(400):
        made.observe_step(step(dice.randrange(1, 40), 0))
        made.observe_step(step(dice.randrange(1, 40), dice.randrange(200, 3000)))
    return made


class TestNiyama:
    def test_a_step_holds_what_the_least_slack_leaves_time_for(self) -> None:
        made = learned()
        for slack in (0.012, 0.018, 0.024):
            tokens = (slack / 1.2 - 5e-3) / 1e-5
            assert made.budget(view(waiting=3, slack=slack)) in (
                whole_tiles(int(10 + tokens * off), 10) for off in (0.97, 1.03)
            )
        assert made.budget(view(waiting=3, slack=1.0)) == made.budget(view(waiting=3)) == whole_tiles(2552, 10)
        assert made.budget(view(waiting=3, slack=-1.0)) == 128, "it goes on when a decode is late"
        assert made.budget(view(decoding=300, waiting=3, slack=-1.0)) == 300
        assert learned(least=16, tile=1).budget(view(waiting=3, slack=-1.0)) == 16

    def test_it_asks_nothing_of_steps_without_prompts_or_before_it_has_learned(self) -> None:
        assert learned().budget(view(slack=0.001)) == COLD.token_budget
        assert Niyama(COLD).budget(view(waiting=3, slack=0.001)) == COLD.token_budget

    def test_a_pool_that_is_nearly_full_takes_512_tokens_at_most(self) -> None:
        made = learned()
        assert made.budget(view(waiting=1, free=1999)) == 512
        assert made.budget(view(waiting=1, free=2000)) == 2048

    @pytest.mark.parametrize(
        "wrong", [{"margin": 0.9}, {"margin": math.nan}, {"most": 100}, {"most": 1e3}, {"least": 0}]
    )
    def test_constants_out_of_range_are_named(self, wrong: dict[str, Any]) -> None:
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            Niyama(COLD, **wrong)

    def test_the_engine_goes_by_its_order_only_with_that_layer(self) -> None:
        drivers = {layer: driver_of(RIVALS["niyama"], layer, {"alpha": 0.002}) for layer in RIVALS["niyama"].layers}
        made = drivers["full"].ordering
        assert made is not None
        prompt = Request("r", (1,) * 200, SamplingParams(), 1, 3.0)
        assert made({"default": SLO(ttft_ms=500)}).key(prompt) == pytest.approx(3.0 + 0.5 + 0.002 * 200)
        assert {layer for layer, driver in drivers.items() if driver.ordering is not None} == {
            "order",
            "full",
            "relegate",
        }
        assert all(driver.policy == FCFS for driver in drivers.values())
        assert POLICIES["relegate"].late == "relegate"

    def test_relegated_requests_are_served_and_rejected_ones_are_not(self) -> None:
        flood = Bench({name: 3 * rate for name, rate in RATES.peaks.items()})
        rejecting, relegating = (
            run(SHORT, CONTENDERS[f"niyama-{layer}"].driver(()), 1, flood) for layer in ("full", "relegate")
        )
        assert relegating.rejected == 0 < rejecting.rejected
        assert relegating.offered == rejecting.offered


class TestConstants:
    @pytest.mark.parametrize(
        ("made", "wrong"),
        [
            (AimdController, {"back": 1.0}), (AimdController, {"back": 0.4}), (AimdController, {"more": 0}),
            (AimdController, {"floor": 1.5}), (BisectionController, {"wide": 0.0}), (BisectionController, {"slow": 1.0}),
            (BisectionController, {"tolerance": -0.1}), (GradientController, {"tolerance": 0.9}),
            (GradientController, {"smoothing": 0.0}), (GradientController, {"queue": 0}), (GradientController, {"window": True}),
        ],
    )  # fmt: skip
    def test_those_out_of_range_are_named(self, made: Callable[..., object], wrong: dict[str, Any]) -> None:
        ((name, value),) = wrong.items()
        slo = {} if made is GradientController else {"slo": SLO(tpot_ms=20)}
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            made(start=COLD, **slo, **wrong)

    def test_they_take_the_place_of_those_published(self) -> None:
        slow = StepRecord(0.0, 0.1, 1, 50, 5000, 0, 0, 0, 0, 50, 50, 0, 0, 100, 0, 0, 8192, LimitedBy.BUDGET)
        aimd = AimdController(SLO(tpot_ms=20), COLD, back=0.5, floor=300)
        for limit in (4096, 2048, 1024, 512, 300, 300):
            aimd.observe_step(slow)
            assert aimd.decide(0.0, COLD, LIMITS).knobs.token_budget == whole_tiles(limit, 0)
            assert aimd.limit == limit
        bisection = BisectionController(SLO(tpot_ms=20), COLD, wide=0.1, slow=0.5)
        bisection.observe_step(slow)
        bisection.decide(0.0, COLD, LIMITS)
        assert bisection.high == pytest.approx(32 + 0.1 * (32 + 8192) / 2)
        gradient = GradientController(COLD, knob="token_budget", queue=600, smoothing=1.0)
        gradient.observe_step(step(50, 5000))
        found = gradient.decide(0.0, COLD, KnobLimits(2048, 1000, 16384, 16384))
        assert found.knobs == COLD.with_(token_budget=8704, chunk_size=8704), "8,792 in whole tiles"

    @pytest.mark.slow
    def test_every_draw_makes_a_contender(self) -> None:
        dice = random.Random(5)
        for base, ranges in RANGES.items():
            for _ in range(4):
                drawn = {name: draw(dice) for name, draw in ranges.items()}
                layer = "full" if base in ("p-pas", "niyama") else "knobs"
                outcome = run(SHORT, driver_of(RIVALS[base], layer, drawn), 1, Bench(dict.fromkeys(RATES.peaks, 0.5)))
                assert outcome.offered == outcome.met + (outcome.offered - outcome.met) > 0

    def test_those_found_are_kept_with_how_they_were_found(self) -> None:
        document = json.loads(constants.FILE.read_text())
        assert (
            {"aimd", "bisection", "gradient"} <= set(document["constants"]) == set(document["reported"]) <= set(RANGES)
        )
        assert "benchmarks.controller.tune" in document["command"]
        for base, by_layer in document["constants"].items():
            for layer, found in by_layer.items():
                assert set(found) <= set(RANGES[base]), (base, layer)
                reported = document["reported"][base][layer]
                assert reported["share_of_the_oracle"] >= reported["as_published"]
                assert max(reported["seeds"]) <= 10 and "M14" in reported["scenarios"].split()

    def test_knobs_alone_have_their_own(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        path = tmp_path / "c.json"
        path.write_text(json.dumps({"constants": {"aimd": {"knobs": {"more": 5}, "full": {"more": 7}}}}))
        monkeypatch.setattr(constants, "FILE", path)
        constants._found.cache_clear()
        try:
            assert constants_of("aimd", "knobs") == {"more": 5}
            assert constants_of("aimd", "budget") == constants_of("aimd", "full") == {"more": 7}
            assert constants_of("bisection", "full") == {}
        finally:
            constants._found.cache_clear()


class FakeWorkers:
    """Serves as many requests as ``worth`` says, and keeps what it was asked."""

    def __init__(self, worth: Callable[[Trial], int]) -> None:
        self.worth, self.trials = worth, list[Trial]()

    def each(self, work: object, trials: Iterable[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        for trial in trials:
            self.trials.append(trial)
            met = self.worth(trial)
            yield trial, Outcome(((100, met),), ((100, met),))


class TestTune:
    ROUNDS = (Round(("M1",), (1,), 4), Round(("M1", "M2"), (2,), 2), Round(("M1", "M2"), (3, 4), 1))
    BEST = {(name, seed): 100 for name in ("M1", "M2") for seed in (1, 2, 3, 4)}  # noqa: RUF012

    def test_seeds_one_to_ten_and_the_scenarios_that_ours_was_tuned_on(self) -> None:
        assert [stage.seeds for stage in tune.ROUNDS] == [(1,), (2,), (3, 4, 5, 6, 7, 8, 9, 10)]
        names = tuple(scenario.name for scenario in (*MATRIX, *MEASURED))
        assert not {scenario.name for scenario in (*FROZEN, *ANSWERS)} & set(names)
        assert [stage.scenarios for stage in tune.ROUNDS[1:]] == [names, names] and set(tune.FEW) <= set(names)
        for base, layer in (("gradient", "knobs"), ("p-pas", "full")):
            workers = FakeWorkers(lambda trial: 50)
            best = {(name, seed): 100 for name in names for seed in known.TUNED}
            Search(workers, best).of(base, layer, 4)  # type: ignore[arg-type]
            assert {trial.seed for trial in workers.trials} == set(known.TUNED)
            assert {trial.scenario for trial in workers.trials if trial.seed > 1} == set(names)

    def test_the_best_wins_and_those_published_go_all_the_way(self) -> None:
        workers = FakeWorkers(lambda trial: min(99, int(dict(trial.constants).get("more", 20))))  # type: ignore[call-overload]
        found = Search(workers, self.BEST, self.ROUNDS).of("aimd", "knobs", 8)  # type: ignore[arg-type]
        drawn = [c["more"] for c in candidates_of("aimd", "knobs", 8)[1:]]
        assert min(99, found.constants["more"]) == min(99, max(drawn))
        assert found.share == pytest.approx(min(99, max(drawn)) / 100) and found.published == pytest.approx(0.2)
        stages = [[t for t in workers.trials if t.seed in stage.seeds] for stage in self.ROUNDS]
        assert [len({t.candidate for t in stage}) for stage in stages] == [9, 5, 3]
        assert found.runs == len(workers.trials) == 9 + 5 * 2 + 3 * 4

    def test_where_nothing_beats_them_those_published_stay(self) -> None:
        workers = FakeWorkers(lambda trial: 50)
        found = Search(workers, self.BEST, self.ROUNDS).of("aimd", "full", 4)  # type: ignore[arg-type]
        assert found.constants == {} and found.share == found.published == 0.5

    def test_scenarios_count_alike_and_the_first_round_not_at_all(self) -> None:
        worth = {
            ("M1", 1): 0,
            ("M1", 2): 100,
            ("M2", 2): 50,
            ("M1", 3): 100,
            ("M2", 3): 50,
            ("M1", 4): 100,
            ("M2", 4): 0,
        }
        found = Search(FakeWorkers(lambda t: worth[t.scenario, t.seed]), self.BEST, self.ROUNDS).of("p-pas", "full", 2)  # type: ignore[arg-type]
        assert found.share == pytest.approx((1 + 100 / 300) / 2)

    def test_equal_questions_draw_equal_constants(self) -> None:
        assert (
            candidates_of("niyama", "full", 6)
            == candidates_of("niyama", "full", 6)
            != candidates_of("niyama", "full", 5)
        )
        assert candidates_of("aimd", "knobs", 3)[1:] != candidates_of("aimd", "full", 3)[1:]
        assert len(candidates_of("p-pas", "full", 50)) == 9, "eight caps, and the published one"

    @pytest.mark.parametrize("arguments", [["--samples", "0"], ["--jobs", "-1"], ["--rival", "pid"]])
    def test_bad_input_is_one_line_and_nothing_is_written(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(tune, "FILE", tmp_path / "c.json")
        assert tune.main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {arguments[0]} is {arguments[1]}")
        assert not (tmp_path / "c.json").exists()


def test_interval_is_that_of_the_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    intervals: list[float] = []
    real = contenders.control

    def spied(*args: Any, **more: Any) -> Any:
        intervals.append(more["interval_s"])
        return real(*args, **more)

    monkeypatch.setattr(contenders, "control", spied)
    for given in ({}, {"interval_s": 0.5}):
        run(SHORT, driver_of(RIVALS["aimd"], "knobs", given), 1, Bench(dict.fromkeys(RATES.peaks, 0.5)))
    assert intervals == [0.25, 0.5]
