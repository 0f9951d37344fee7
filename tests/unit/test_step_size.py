"""How large steps may be where those within the target do not carry the load, and what load is asked for."""

from __future__ import annotations

import pytest

from autotune.control.controllers.predictive.step_size import as_fast, full_step, most_in_time
from autotune.control.controllers.predictive.traffic import Demand, Traffic
from runtime.records import LimitedBy, StepRecord
from tests.building import request_record

LINEAR = 0.002, 25e-6  # s, s a token
TOP = 8192


def linear(n: int) -> float:
    return LINEAR[0] + LINEAR[1] * n


def experts(n: int) -> float:
    """Any prompt makes a step read nearly all of the weights, which takes as long as a thousand tokens to compute."""
    return 1e-3 + max(15.6e-3 * (1 - 0.9375**n), 13.3e-6 * n)


class TestAsFast:
    def test_a_smaller_step_will_do_where_prompts_are_computed_as_fast(self) -> None:
        """1,044 tokens compute 96% as many of prompts a second as 2,000."""
        assert as_fast(linear, 20, 2_000) == 1_044

    def test_and_the_largest_where_steps_have_much_of_their_own(self) -> None:
        def seconds(n: int) -> float:
            return 0.1 + 25e-6 * n

        found = as_fast(seconds, 20, 8_000)
        rates = [(n - 20) / seconds(n) for n in (found, 8_000)]
        assert 5_000 < found < 8_000
        assert rates[0] >= 0.95 * rates[1]

    @pytest.mark.parametrize("most", [0, 10, 300, 1_044])
    def test_small_steps_are_left_as_they_are(self, most: int) -> None:
        assert as_fast(linear, 20, most) == most


class TestMostInTime:
    def test_the_smallest_of_those_that_are_alike(self) -> None:
        shares = {100: 0.5, 200: 0.895, 400: 0.904, 800: 0.9, 1_000: 0.3}
        assert most_in_time(shares.__getitem__, 100, 1_000) == 200

    def test_never_less_than_what_long_answers_need_nor_more_than_the_engine_takes(self) -> None:
        assert most_in_time(lambda n: n / 100, 48, 100) == 100
        assert most_in_time(lambda n: 1 / n, 48, 100) == 48
        assert most_in_time(float, 100, 100) == 100

    def test_none_is_looked_for_where_all_are_in_time(self) -> None:
        shares = {48: 0.7, 96: 0.995}
        assert most_in_time(shares.__getitem__, 48, 8_192) == 96


class TestFullStep:
    @pytest.mark.parametrize(
        "demand", [0.0, 5_000.0, 36_000.0, 80_000.0], ids=["none", "some", "nearly all", "too much"]
    )
    def test_where_time_is_all_tokens_a_step_is_what_fits_the_step_time_target_whatever_the_load(
        self, demand: float
    ) -> None:
        found, within = full_step(linear, 20, 0.03, demand, TOP, 100)
        assert found == within == round((0.03 - LINEAR[0]) / LINEAR[1])

    @pytest.mark.parametrize("guess", [1, 40, 500, TOP])
    def test_where_any_prompt_is_dear_they_come_together_if_the_load_asks_for_it(self, guess: int) -> None:
        """A step of 15 ms holds some 40 tokens here, one of 17 over a thousand."""
        little = full_step(experts, 6, 0.015, 500.0, TOP, guess)
        assert little[0] == little[1] < 60
        much, within = full_step(experts, 6, 0.015, 23_000.0, TOP, guess)
        assert within == little[1]
        assert 800 < much < 1600

    def test_what_it_finds_carries_the_load_and_meets_the_mean_step_time(self) -> None:
        """Played out: prompts in steps of that size, decodes alone in between."""
        demand, pace = 23_000.0, 0.015
        found, _ = full_step(experts, 6, pace, demand, TOP, 100)
        now, owed, steps = 0.0, 0.0, 0
        while now < 60:
            took = experts(found) if owed >= found - 6 else experts(6)
            owed += demand * took - (found - 6 if owed >= found - 6 else 0)
            now, steps = now + took, steps + 1
        assert owed < 2 * found
        assert now / steps <= pace

    def test_where_decodes_alone_take_longer_than_the_target_no_size_is_looked_for(self) -> None:
        asked = []

        def seconds(n: int) -> float:
            asked.append(n)
            return 0.02 + 1e-6 * n

        found, within = full_step(seconds, 100, 0.015, 5_000.0, TOP, 100)
        assert found == within == 0
        assert max(asked) <= 100

    def test_a_load_that_no_size_carries_leaves_the_step_time_target_in_force(self) -> None:
        found, within = full_step(experts, 6, 0.015, 90_000.0, TOP, 100)
        assert found == within

    @pytest.mark.parametrize("better", [True, False])
    def test_prompts_come_together_only_where_more_requests_are_in_time(self, better: bool) -> None:
        """Any prompt costs 5 ms more, and steps within the target carry 92% of the load."""

        def attains(n: int) -> float:
            return 0.9 if (n > 250) == better else 0.6

        def seconds(n: int) -> float:
            return 0.01 if n <= 10 else 0.015 + 20e-6 * n

        found, within = full_step(seconds, 10, 0.02, 13_000.0, TOP, 100, attains)
        assert within == 250
        assert (found > within) == better

    def test_where_each_step_has_a_budget_a_longer_one_that_leaves_a_shorter_mean_gap_is_preferred(self) -> None:
        """Any prompt costs 5 ms more. The first size that carries the load, 175 tokens, has gaps of 14.5 ms, 706 tokens 11.3."""

        def seconds(n: int) -> float:
            return 0.009 if n <= 20 else 0.0135 + 22e-6 * n

        alone, budgeted = (full_step(seconds, 20, 0.0145, 7_000.0, TOP, 100, None, long)[0] for long in (1.0, 0.35))
        assert 20 + 32 < alone < budgeted < 1000

    def test_a_step_time_that_decodes_alone_exceed_leaves_nothing_to_find(self) -> None:
        assert full_step(linear, 2000, 0.03, 30_000.0, TOP, 100) == (1120, 1120)

    def test_never_above_the_ceiling(self) -> None:
        assert full_step(linear, 4, 1.0, 1e6, 512, 100) == (512, 512)
        assert full_step(experts, 4, 0.015, 23_000.0, 256, 100)[0] <= 256


def step(start: float, end: float, prefill: int, waiting_tokens: int) -> StepRecord:
    return StepRecord(
        start, end, 1, 4, 4000, 1, prefill, prefill, prefill, 5, 5, 1, waiting_tokens, 100, 0, 0, 1024, LimitedBy.BUDGET
    )  # fmt: skip


class TestDemand:
    def test_counts_what_is_computed_what_comes_to_wait_and_what_is_lost(self) -> None:
        demand, waiting = Demand(), 0
        assert demand.per_second == 0
        for k in range(
            400
        ):  # 20 steps a second: 30 000 tokens asked for, two thirds computed, 150 of the rest lost each step
            waiting += 350
            demand.step(step(k * 0.05, (k + 1) * 0.05, 1000, waiting))
            demand.lost(150)
        assert demand.per_second == pytest.approx(30_000, rel=0.02)

    def test_a_queue_that_is_worked_off_is_no_load(self) -> None:
        demand = Demand()
        demand.step(step(0, 0.1, 0, 20_000))
        for k in range(1, 21):
            demand.step(step(k * 0.1, (k + 1) * 0.1, 1000, 20_000 - 1000 * k))
        for k in range(21, 400):
            demand.step(step(k * 0.1, (k + 1) * 0.1, 0, 0))
        assert demand.per_second < 500

    @pytest.mark.parametrize("gap", [0.0, 10.0, 30.0, 59.0, 300.0])
    def test_a_pause_counts_for_no_longer_than_the_memory(self, gap: float) -> None:
        demand, now = Demand(5.0), 0.0
        for began in (0.0, 40.0 + gap):
            for k in range(800):  # 10 000 tokens a second
                now = began + k * 0.05
                demand.step(step(now, now + 0.05, 500, 0))
                if now == began + 10 and began:
                    assert demand.per_second > 8_500
        assert demand.per_second == pytest.approx(10_000, rel=0.02)

    @pytest.mark.parametrize("every", [59.0, 61.0, 300.0])
    def test_a_request_now_and_then_is_no_load(self, every: float) -> None:
        demand = Demand(20.0)
        for k in range(20):
            for n in range(40):
                demand.step(step(k * every + n * 0.05, k * every + (n + 1) * 0.05, 200 if n == 0 else 0, 0))
        assert demand.per_second < 20

    def test_silence_and_time_that_jumps_back_are_borne(self) -> None:
        demand = Demand()
        demand.step(step(0, 0.1, 1000, 0))
        demand.step(step(1e6, 1e6 + 0.1, 1000, 0))
        demand.step(step(5, 5.1, 1000, 0))
        assert 0 < demand.per_second < 2e4


def test_of_prompts_that_are_mostly_cached_only_the_rest_is_to_be_computed() -> None:
    traffic = Traffic()
    assert traffic.uncached == 1
    for _ in range(200):
        traffic.request(request_record()._replace(prompt_tokens=1000, cached_tokens=900))
    assert traffic.uncached == pytest.approx(0.1)
    for _ in range(400):
        traffic.request(request_record()._replace(prompt_tokens=1000))
    assert traffic.uncached > 0.99
