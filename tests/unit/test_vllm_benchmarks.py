"""The live benchmarks of vLLM, all but vLLM: loads, contenders, rounds, figures and the truth, in simulation."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.bench import fixed
from autotune.measure.evaluate import Interrupted
from autotune.profile import find_profile, load_profile
from autotune.profile.serving import serving_cost
from autotune.simulate import SimulatedEngine
from autotune.simulate.scenario import Scenario
from benchmarks import vllm_fidelity
from benchmarks.fidelity.table import relative_error
from benchmarks.kept import Kept
from benchmarks.live.contenders import admitted
from benchmarks.live.machine import Machine
from benchmarks.live.ratios import Ratio
from benchmarks.live.serving import Contest, turn
from benchmarks.sweep.rivals import Choice
from benchmarks.vllm import overhead
from benchmarks.vllm.machine import simulated
from benchmarks.vllm.model import MAX_MODEL_LEN, SMALL, model_folder
from benchmarks.vllm.overhead import _a_step
from benchmarks.vllm.starting import DEFAULTS, LIMITS, apart
from benchmarks.vllm_live import __main__ as live_command
from benchmarks.vllm_live import client
from benchmarks.vllm_live.agreement import Agreement
from benchmarks.vllm_live.cases import (
    AT_DEFAULTS,
    GRID,
    KNOBS_ONLY,
    NAMES,
    NEIGHBOURS,
    OURS,
    SHARES,
    STOCK,
    cases,
    rivals,
)
from benchmarks.vllm_live.client import Found, Lengths, Run
from benchmarks.vllm_live.summary import ADMITTED, BEST, Figures, compared, report, summary
from benchmarks.vllm_sweep import __main__ as sweep_command
from benchmarks.vllm_sweep.__main__ import AUTO_TUNE, FULL, QUICK, TPE, Result, held_out, means, ratio, regret, truth
from benchmarks.vllm_sweep.__main__ import OURS as SEARCHED
from benchmarks.vllm_sweep.rig import Case, LiveRig
from runtime.errors import ModelError
from runtime.knobs import Knobs
from runtime.slo import SLO
from tests.unit.paced import FACTS

MODEL = FACTS.model_copy(update={"max_model_len": MAX_MODEL_LEN})
COST = serving_cost(load_profile(find_profile("cpu-2core-tiny")))
SECONDS = 5.0
SMALL_STEPS = fixed(Knobs(64, 0, 96, 96))


def test_fidelity_tells_a_machine_of_another_speed_from_a_simulator_that_is_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    profile = load_profile(find_profile("cpu-2core-tiny"))
    scenario = Scenario.of(profile).even()
    served = vllm_fidelity.faster(scenario, 1.06)
    with served.start(profile.settings["balanced"].knobs) as engine:
        found = vllm_fidelity.compared(engine, profile, scenario, 30.0, (0.5, 0.7), 2, 8.0, lambda: False)
    for errors in found.values():
        assert errors["steps"] == pytest.approx([0.06, 0.06], abs=1e-6)
        assert min(errors["TPOT p50"]) >= 0.06, "longer steps hold more sequences"
        assert errors["TPOT p50 as fast"] == pytest.approx([0, 0], abs=1e-6)
    shape = vllm_fidelity.report(found)
    assert shape["rounds"] == {"0.5": 2, "0.7": 2}
    middle, low, high = shape["shares"]["0.7"]["tpot_p50"]
    assert low < middle < high and shape["tpot_p50"] in (middle, shape["shares"]["0.5"]["tpot_p50"][0])
    assert "TPOT p50 as fast" in capsys.readouterr().out


def test_fidelity_that_is_stopped_claims_no_error_where_nothing_was_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    profile = load_profile(find_profile("cpu-2core-tiny"))
    scenario = Scenario.of(profile).even()
    with scenario.start(profile.settings["balanced"].knobs) as engine:
        found = vllm_fidelity.compared(engine, profile, scenario, 30.0, (0.5, 0.9), 2, 8.0, lambda: True)
    shape = vllm_fidelity.report(found)
    assert shape.pop("rounds") == {"0.5": 0, "0.9": 0} and shape.pop("shares") == {"0.5": {}, "0.9": {}}
    assert shape == dict.fromkeys(("tpot_p50", "throughput", "ttft_p50", "steps", "tpot_p50_as_fast"))
    assert "no round counted at 0.5, 0.9 of capacity" in capsys.readouterr().out
    names = ("TPOT p50", "throughput", "TTFT p50", "steps", "TPOT p50 as fast")
    part = vllm_fidelity.report({0.5: {name: [-0.2, 0.1, -0.1] for name in names}, 0.9: {name: [] for name in names}})
    assert part["tpot_p50"] == -0.1 and part["rounds"] == {"0.5": 3, "0.9": 0}
    assert "no round counted at 0.9 of capacity" in capsys.readouterr().out
    nothing = vllm_fidelity.report({0.5: {name: [relative_error(3.0, 0.0)] for name in names}})
    assert nothing["tpot_p50"] is None, "nothing came of the real run: that is no error of 0"


@pytest.mark.parametrize("stopped", [True, False])
def test_fidelity_that_is_stopped_says_so_in_its_json_and_exit_code(
    stopped: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_fidelity, "prepared", lambda args: SMALL)
    monkeypatch.setattr(vllm_fidelity, "model_folder", lambda folder, preset: folder)
    monkeypatch.setattr(vllm_fidelity, "_compared", lambda *_: {"tpot_p50": None, "stopped": stopped})
    assert vllm_fidelity.main(["--profile", str(find_profile("cpu-2core-tiny"))]) == (130 if stopped else 0)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"tpot_p50": None, "stopped": stopped}


@pytest.fixture
def machine() -> Machine:
    engine = SimulatedEngine(COST, kv_tokens=60_000, block_size=32, limits=LIMITS, prefix_cache=False)
    return Machine(engine, MODEL, engine.clock)


def test_three_shares_of_capacity_and_a_shift(machine: Machine) -> None:
    found = {case.name: case for case in cases(machine, COST, SECONDS)}
    assert tuple(found) == NAMES and [case.shifts for case in found.values()] == [False, False, False, True]
    full = found["full"].workload.rate
    for name, share in SHARES.items():
        assert found[name].workload.rate == pytest.approx(share * full)
        assert found[name].slo == found["prompts"].slo
    arrivals = list(found["prompts"].workload.arrivals(3, duration=200.0))
    assert all(a.time <= b.time for a, b in pairwise(arrivals))
    before, after = ([a.prompt_tokens for a in arrivals if (a.time < SECONDS / 2) is first] for first in (True, False))
    assert sum(after) / len(after) > 1.5 * sum(before) / len(before), "prompts get longer"


def test_contenders_begin_at_the_defaults_of_the_server() -> None:
    assert AT_DEFAULTS.knobs == STOCK.knobs == OURS.knobs == KNOBS_ONLY.knobs == DEFAULTS
    assert not AT_DEFAULTS.control and not STOCK.control and OURS.control and KNOBS_ONLY.control
    assert len(set(GRID)) == len(GRID) >= 24 and all(LIMITS.clamp(knobs) == knobs for knobs in GRID)


def test_a_fixed_setting_with_admission_holds_its_knobs_and_rejects(machine: Machine) -> None:
    load = cases(machine, COST, SECONDS)[0]
    load = load._replace(workload=load.workload.at_rate(3 * load.workload.rate))
    contender = admitted(Knobs(8, 0, 64, 64))
    found = turn(machine, load, contender, 0, 5, 5, SECONDS)
    assert machine.engine.knobs == contender.knobs
    assert found.score.violations.get("completion", 0) > 10, "the late ones are rejected"
    plain = turn(machine, load, fixed(contender.knobs), 0, 5, 5, SECONDS)
    assert found.score.met > plain.score.met


def test_a_load_is_served_at_what_is_good_at_the_loads_beside_it_and_at_what_has_won() -> None:
    small, light, over, far = (
        Knobs(batch, 0, budget, budget) for batch, budget in ((32, 96), (16, 96), (8, 64), (64, 48))
    )
    assert {small, light, over, far} <= {*GRID} and NEIGHBOURS.keys() == {*NAMES}
    best = {"full": [small], "light": [light, small], "over": [over], "prompts": [far]}
    plain, late = ({name: [*map(kind, found)] for name, found in best.items()} for kind in (fixed, admitted))
    assert rivals("full", plain) == [*map(fixed, (small, light, over))], "those beside it, once each, behind its own"
    assert rivals("full", late) == [*map(admitted, (small, light, over))]
    assert rivals("over", plain) == [*map(fixed, (over, small))]
    won = [fixed(light).name, admitted(far).name, "defaults"]
    assert set(rivals("over", plain, won)) == {*map(fixed, (over, small, light, far))}, "with admission or without"
    assert set(rivals("over", late, won)) == {*map(admitted, (over, small, light, far))}
    assert len(rivals("prompts", plain, won)) == 3


@pytest.mark.slow
def test_a_contest_in_pieces_serves_each_load_at_what_is_good_beside_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = [Knobs(batch, 0, budget, budget) for batch, budget in ((64, 96), (16, 96), (8, 2048))]
    monkeypatch.setattr(live_command, "GRID", grid)
    monkeypatch.setattr(live_command, "calibrate", lambda *_: COST)
    monkeypatch.setattr(live_command, "served", lambda machine, cost, *_: cost)
    plan, done = live_command.Plan((1, 1), 2.0, 1.0, 2), dict[str, Figures]()
    kept = Kept(tmp_path / "kept", {})
    args = argparse.Namespace(seed=0, threads=1, keep=tmp_path / "kept", log=None)
    lengths = list[Lengths]()
    live_command._contest(simulated(COST, machine), plan, args, ["light", "over"], kept, done, lengths, lambda: False)
    assert len(lengths) == 1 and min(lengths[0]) > 1
    assert [*done] == ["light", "over"] == [part["name"] for part in kept.known()]
    light, over = (set(done[name].shape["fixed settings"]) for name in ("light", "over"))
    assert set(done["light"].winners) <= light
    for name in done["light"].winners:
        plain = name.removesuffix(" with admission")
        assert {plain, f"{plain} with admission"} <= over, "what has won at one load is measured at the next"
    assert capsys.readouterr().err.count("is served at") == 2


@pytest.mark.slow
def test_from_the_loads_to_the_json_line(machine: Machine) -> None:
    chosen = [case for case in cases(machine, COST, SECONDS) if case.name in ("over", "prompts")]
    statics = [SMALL_STEPS, fixed(Knobs(8, 0, 256, 256)), admitted(SMALL_STEPS.knobs), admitted(Knobs(8, 0, 32, 32))]
    contest = Contest(
        simulated(COST, machine), chosen, [AT_DEFAULTS, STOCK, OURS, KNOBS_ONLY], {case.name: statics for case in chosen}, (2, 1),
        seed=0, duration=SECONDS, stop=lambda: False, tell=lambda case, result: None, fail=lambda case, contender, cause: None,
    )  # fmt: skip
    contest.run()
    for case in chosen:
        last = {r.turn.contender for r in contest.results(case) if r.turn.round == 1}
        assert len(last & set(statics)) == 2 and len([c for c in last & set(statics) if c.control]) == 1, (
            "one of a kind"
        )
    found = compared(contest, chosen, SECONDS)
    said: list[str] = []
    report(found, said.append)
    assert sum("goodput ÷ that of: defaults" in line for line in said) == 4
    kept = [Figures.of_json(json.loads(json.dumps(Figures.of(c).as_json()))) for c in found]
    shape = json.loads(json.dumps(summary(kept)))
    assert shape["vs_best_static"] == summary([*map(Figures.of, found)])["vs_best_static"], "the same from a file"
    wanted = ("vs_defaults", "vs_stock", "vs_best_static", "vs_best_static_with_admission", "shift_vs_best_static")
    for name in wanted:
        low, high = shape["intervals"][name]
        assert 0 < low <= shape[name] <= high
    for of_load in shape["cases"].values():
        assert of_load["stock"]["offered"] == of_load["ours"]["offered"] and "stock" not in of_load["fixed settings"]
        assert of_load["ratios"]["stock"][0] == pytest.approx(of_load["ratios"]["defaults"][0], rel=0.2), (
            "simulated, the same"
        )
    assert shape["vs_defaults"] > 1.05, "steps of 2048 tokens hold back all that decodes"
    over, prompts = (found[0].ours[BEST], found[1].ours[BEST])
    assert shape["vs_best_static"] == pytest.approx(over.value, abs=1e-4)
    assert shape["shift_vs_best_static"] == pytest.approx(prompts.value, abs=1e-4)
    of_case = shape["cases"]["over"]
    assert sorted(of_case["fixed settings"]) == sorted(c.name for c in statics)
    assert kept[0].winners == [of_case[BEST]["name"], of_case[ADMITTED]["name"]] and len(set(kept[0].winners)) == 2
    assert (
        of_case[ADMITTED]["name"].endswith("with admission")
        and of_case[ADMITTED]["offered"] == of_case["ours"]["offered"]
    )


BROKE_OFF = (
    'Traceback (most recent call last):\n  File "vllm/benchmarks/lib/endpoint_request_func.py", line 236, in '
    "async_request_openai_completions\n    async for chunk_bytes in response.content.iter_any():\n"
    "aiohttp.client_exceptions.ClientPayloadError: Response payload is not completed\n"
)


def client_run(monkeypatch: pytest.MonkeyPatch, folder: Path, good: int, *errors: str) -> Run:
    """A run of 100 requests, of which those with ``errors`` failed, by what ``vllm bench serve`` writes of it."""
    said = {"duration": 8.0, "completed": 100 - len(errors), "failed": len(errors), "request_goodput": good / 8.0}
    detailed = {"errors": [""] * (100 - len(errors)) + [*errors]}

    def run(command: list[str], **_: Any) -> Any:
        result = Path(command[command.index("--result-dir") + 1]) / command[command.index("--result-filename") + 1]
        result.write_text(json.dumps(said | (detailed if "--save-detailed" in command else {})))
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(client.subprocess, "run", run)
    server = type("Server", (), {"url": "http://127.0.0.1:1", "folder": folder})
    return client.send(server, Lengths(60, 20), folder, count=100, seed=1)  # type: ignore[arg-type]


def test_the_client_counts_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    late, full = "Too Many Requests", "Service Unavailable"
    each = [(40,), (50,)], [(60, *[late] * 18, full), (75, *[late] * 17, full, BROKE_OFF, "Internal Server Error")]
    runs = [[client_run(monkeypatch, tmp_path, *one) for one in side] for side in each]
    found = Found(SLO(ttft_ms=800), 5.0, *runs, attached=True)
    assert found.ratio.value == pytest.approx(1.5) and found.ratio.low == pytest.approx(1.5)
    assert [run.refused for run in (*found.stock, *found.ours)] == [0, 0, 19, 18]
    assert [run.lost for run in (*found.stock, *found.ours)] == [0, 0, 0, 2]
    assert math.isnan(Found(SLO(ttft_ms=800), 5.0, [], [], attached=False).ratio.value)


def test_rounds_in_which_stock_has_nothing_in_time_are_infinitely_better_and_not_left_out() -> None:
    def found(stock: tuple[int, ...], ours: tuple[int, ...]) -> Found:
        runs = ([Run(100, 100, 0, good, {}) for good in each] for each in (stock, ours))
        return Found(SLO(ttft_ms=800), 5.0, *runs, attached=True)

    value, low, high = found((0, 50), (60, 75)).ratio
    assert (value, low, high) == (pytest.approx(2.7), pytest.approx(1.5), math.inf), "a quarter of the draws"
    assert found((0, 0), (60, 75)).ratio == (math.inf, math.inf, math.inf)
    assert math.isnan(found((0, 0), (0, 0)).ratio.value)
    alone = found((50,), (60,)).ratio
    assert alone.value == pytest.approx(1.2) and math.isnan(alone.low) and math.isnan(alone.high), "of one round"


class Bench:
    """The client and its servers, without either: every run that is sent, by its server and its seed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> None:
        self.sent: list[tuple[str, int, float | None]] = []
        self.failed, self._fail_at = False, fail_at
        monkeypatch.setattr(client, "_servers", self._servers)
        monkeypatch.setattr(client, "send", self._send)

    @contextmanager
    def _servers(self, folder: Path, logs: Path, slo: Any) -> Iterator[Any]:
        yield "stock", "ours", slo("stock")

    def _send(self, server: Any, lengths: Lengths, logs: Path, *, count: int, seed: int, **how: Any) -> Run:
        self.sent.append((server, seed, how.get("rate")))
        if seed == self._fail_at:
            self.failed = True
            raise RuntimeError("vllm bench serve failed:")
        times = {"median_itl_ms": 10.0, "p99_tpot_ms": 12.0, "median_ttft_ms": 30.0}
        return Run(count, count, 0, count // 2, {**times, "completed": count, "duration": 8.0})

    def contest(self, stop: Any) -> Found:
        silent: Any = lambda text: None  # noqa: E731
        return client.contest(Path(), Lengths(60, 20), share=1.0, rounds=3, seconds=4.0, say=silent, stop=stop)


def test_the_client_warms_up_both_servers_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    found = bench.contest(lambda: False)
    assert [run for run in bench.sent if run[2] is not None][:2] == [("stock", 4, found.rate), ("ours", 4, found.rate)]
    assert len(found.stock) == len(found.ours) == 3


def test_ctrl_c_ends_the_client_and_leaves_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, fail_at=11)
    found = bench.contest(lambda: bench.failed)
    assert len(found.stock) == len(found.ours) == 1 and found.ratio.value == 1.0
    with pytest.raises(RuntimeError, match="bench serve failed"):
        Bench(monkeypatch, fail_at=11).contest(lambda: False)


@pytest.mark.parametrize("module", ["__future__", "platform"])
def test_a_process_that_says_nothing_has_failed(module: str) -> None:
    with pytest.raises(RuntimeError, match=f"-m {module} is no JSON"):
        apart(module, [], threads=1)


class TestParts:
    """The command, each of its parts at the word of a test."""

    @pytest.fixture(autouse=True)
    def parts(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        ratio, twice = (Ratio(value, np.log(np.full(8, value))) for value in (1.25, 2.0))
        figures = Figures("over", False, {"slo": "x"}, {"defaults": ratio, "stock": twice}, {"defaults": ratio})

        def contest(*args: Any) -> dict[str, Any]:
            args[5]["over"] = figures
            args[6].append(Lengths(60, 20))
            return {"failed_turns": 0}

        agreed = Agreement(48, 0, 0, 1.0, 7)
        monkeypatch.setattr(live_command, "prepared", lambda args: SMALL)
        monkeypatch.setattr(live_command, "model_folder", lambda folder, preset: folder)
        monkeypatch.setattr(live_command, "live", lambda folder, preset: nullcontext(machine))
        monkeypatch.setattr(live_command, "_contest", contest)
        monkeypatch.setattr(live_command.overhead, "measured_apart", lambda *_, **__: self._fails("overhead"))
        monkeypatch.setattr(live_command.agreement, "compared_apart", lambda *_, **__: agreed)
        monkeypatch.setattr(live_command.client, "contest", lambda *_, **__: self._fails("client"))

    def _fails(self, part: str) -> Any:
        raise RuntimeError(f"{part} broke down\nat line 3")

    def said(self, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found

    def test_a_part_that_fails_costs_the_others_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert live_command.main(["--quick"]) == 1
        found = self.said(capsys)
        assert found["failures"] == ["overhead: overhead broke down", "client: client broke down"]
        assert found["vs_defaults"] == 1.25 and found["agreement"]["served"] == 48 and found["stopped"] is False
        assert found["vs_stock"] == 2.0 and found["intervals"]["vs_stock"] == [2.0, 2.0]

    def test_a_contest_that_fails_leaves_what_was_found_before(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def contest(*args: Any) -> Any:
            raise ModelError("vLLM is gone")

        monkeypatch.setattr(live_command, "_contest", contest)
        assert live_command.main(["--quick", "--part", "contest", "--part", "agreement"]) == 1
        found = self.said(capsys)
        assert found["failures"] == ["contest: vLLM is gone"] and found["agreement"]["served"] == 48
        assert found["vs_defaults"] is None

    def test_a_request_that_the_client_lost_is_a_failure(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for lost in (0, 2):
            runs = [Run(100, 100, 0, 50, {})], [Run(100, 80, 20 - lost, 60, {})]
            found = Found(SLO(ttft_ms=800), 5.0, *runs, attached=True)
            monkeypatch.setattr(live_command.client, "contest", lambda *_, found=found, **__: found)
            assert live_command.main(["--quick", "--part", "client"]) == (1 if lost else 0)
            shape = self.said(capsys)
            assert shape["client"]["lost"] == {"stock": [0], "ours": [lost]}
            assert shape["failures"] == (
                ["client: neither completed nor refused were 2 requests to the self-tuning server, 0 to stock"]
                if lost
                else []
            )

    def test_ctrl_c_in_the_last_part_keeps_the_contest(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupted(*_: Any, **__: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            self._fails("client")

        monkeypatch.setattr(live_command.client, "contest", interrupted)
        assert live_command.main(["--quick", "--part", "contest", "--part", "client"]) == 130
        found = self.said(capsys)
        assert found["vs_defaults"] == 1.25 and found["stopped"] is True and found["failures"] == []

    def test_what_other_code_kept_is_told_and_not_counted(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file, made = tmp_path / "kept.jsonl", list[Kept]()

        def kept(*given: Any) -> Kept:
            made.append(Kept(*given))
            return made[-1]

        monkeypatch.setattr(live_command, "Kept", kept)
        arguments = ["--quick", "--part", "contest", "--case", "full", "--keep", str(file)]
        live_command.main(arguments)
        ratio = Ratio(2.0, np.log(np.full(8, 2.0)))
        made[0].add(Figures("full", False, {}, {"defaults": ratio}, {"defaults": ratio}).as_json())
        live_command.main(arguments)
        assert self.said(capsys)["vs_defaults"] == 2.0
        monkeypatch.setattr("benchmarks.kept.code_digest", lambda: "other")
        live_command.main(arguments)
        told = capsys.readouterr()
        assert json.loads(told.out.splitlines()[-1])["vs_defaults"] is None
        assert "1 of the parts there are of other code" in told.err and len(file.read_text().splitlines()) == 1


def test_host_overhead_is_the_larger_and_says_of_what() -> None:
    """Rounds: seconds of stock, scheduler and engine, each without the model, and without the runner."""
    few = [[(1e-3, 5e-4)] * 3, [(1.2e-3, 6e-4)] * 3, [(1.3e-3, 8e-4)] * 3]
    stock = [(2e-3, 1e-3), (2.1e-3, 1e-3), (1.8e-3, 9e-4)]
    many = [stock, [(2.3e-3, 1.2e-3), (2.5e-3, 1.3e-3), (2.1e-3, 1.26e-3)], [(2.4e-3, 1.4e-3)] * 3]
    hosts = [overhead._host(16, few, True), overhead._host(64, many, True)]
    assert hosts[0].beside_runner == (pytest.approx(0.1), pytest.approx(0.3))
    shape = overhead.shape(hosts)
    assert (shape["host_overhead"], shape["host_overhead_of"]) == (0.2, "scheduler")
    assert shape["host_overhead_beside_runner"] == 0.1, "the runner took longer by chance"
    assert shape["intervals"]["host_overhead"] == [0.2, 0.2], "of the number of sequences whose share it is"
    assert hosts[1].interval(1) == [0.1, 0.2]
    uneven = [
        [(1e-3 * s, 1e-3 * s) for s in each]
        for each in ((10, 10, 10, 10, 20, 20, 20), (11, 11, 11, 22, 22, 22, 22), (1,) * 7)
    ]
    medians = overhead._host(64, uneven, True)
    assert medians.share(22e-3) == pytest.approx(1.2), "six of the seven rounds have 0.1"
    assert medians.interval(0) == medians.interval(1) == [0.1, 1.2], "of medians, as the figure is"
    assert "scheduler +200 µs: 0.200 (beside the runner +100 µs: 0.100)" in hosts[0].said()
    assert "beside the runner 0.100 to 0.200 in single rounds" in hosts[1].said()
    bare = [overhead._host(16, few, False), overhead._host(64, many, False)]
    assert (overhead.shape(bare)["host_overhead"], overhead.shape(bare)["host_overhead_of"]) == (0.3, "engine")
    assert "no controller attached to the scheduler" in bare[0].said()
    times = [(0.002 * n, 0.001 * n) for n in range(40)]
    assert _a_step(times) == (pytest.approx(0.002), pytest.approx(0.001))
    with pytest.raises(RuntimeError, match="only 12 steps"):
        _a_step(times[:12])


def test_the_model_has_a_token_for_each_word(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = model_folder(tmp_path / "model", SMALL)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["max_position_embeddings"] == MAX_MODEL_LEN
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    ids = [5, 7999, 2, 77]
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids, "a prompt has the length that a client asks for"


class Fixed:
    """A rig that knows what each setting is worth."""

    limits = LIMITS

    def __init__(self, worth: dict[Knobs, float]) -> None:
        self.worth, self.measured = worth, list[tuple[Knobs, int]]()

    def measure(self, knobs: Knobs, seed: int) -> Any:
        self.measured.append((knobs, seed))
        return type("Score", (), {"goodput": self.worth[knobs]})


def test_regret_is_against_the_best_of_all_that_was_measured() -> None:
    best, ours, low = Knobs(32, 0, 128, 128), Knobs(16, 0, 128, 128), Knobs(8, 0, 32, 32)
    rig = Fixed({best: 10.0, ours: 9.5, low: 5.0, DEFAULTS: 2.0})
    rounds = truth(rig, [best, ours, low, ours, DEFAULTS], 2)  # type: ignore[arg-type]
    assert (shares := means(rounds)) == rig.worth
    assert len(rig.measured) == 8 and [knobs for knobs, _ in rig.measured[:5]] == [best, ours, low, DEFAULTS, ours]
    assert len({seed for _, seed in rig.measured[:4]}) == 1 and rig.measured[0][1] != rig.measured[4][1]
    results = [
        Result(SEARCHED, 1, Choice(ours, 100.0, 8, 8)),
        Result(AUTO_TUNE, 1, Choice(None, 90.0, 1, 1)),
        Result(TPE, 1, Choice(low, 95.0, 4, 4)),
    ]
    assert [regret(r, shares) for r in results] == pytest.approx([0.05, 0.8, 0.5])
    assert ratio(results, shares, TPE) == pytest.approx(1.9) and ratio(results, shares, AUTO_TUNE) == pytest.approx(
        4.75
    )
    shape = sweep_command.summary(results, rounds, 1000.0)
    assert {name: shape[name] for name in ("regret", "time_share_of_grid", "vs_tpe", "vs_auto_tune")} == {
        "regret": 0.05, "time_share_of_grid": 0.1, "vs_tpe": 1.9, "vs_auto_tune": 4.75
    }  # fmt: skip


def test_the_best_by_luck_is_no_measure_of_regret() -> None:
    ours, other = Knobs(16, 0, 128, 128), Knobs(32, 0, 128, 128)
    lucky = {ours: [8.0, 8.0, 8.0, 8.0], other: [18.0, 7.0, 4.0, 7.0], DEFAULTS: [1.0, 1.0, 1.0, 1.0]}
    mine = Result(SEARCHED, 1, Choice(ours, 100.0, 8, 8))
    assert regret(mine, means(lucky)) == pytest.approx(1 / 9)
    low, high = sweep_command.summary([mine], lucky, 1000.0)["intervals"]["regret"]
    assert low == 0.0 and 0.3 < high < 1 - 8 / 18
    assert held_out(mine, lucky) == pytest.approx(1 - 32 / (8 + 7 + 4 + 7))
    better = {**lucky, other: [10.0, 10.0, 10.0, 10.0]}
    assert held_out(mine, better) == pytest.approx(regret(mine, means(better))) == pytest.approx(0.2)
    assert sweep_command.summary([mine], {k: v[:1] for k, v in lucky.items()}, 1000.0)["regret_held_out"] is None
    assert sweep_command.summary([mine], {k: v[:1] for k, v in lucky.items()}, 1000.0)["intervals"] is None


def test_restarts_are_counted_and_not_waited_for(machine: Machine) -> None:
    load = cases(machine, COST, SECONDS)[0]
    case = Case(load.workload, load.slo, QUICK.grid, SECONDS, 1.0)
    rig = LiveRig(machine, case, lambda: False)
    assert rig.spent_s == 0.0
    rig.rest(30.0)
    assert rig.spent_s == 30.0
    score = rig.measure(SMALL_STEPS.knobs, 3)
    assert score.offered > 10 and 30.0 + SECONDS < rig.spent_s < 60.0
    with pytest.raises(Interrupted):
        LiveRig(machine, case, lambda: True).measure(SMALL_STEPS.knobs, 3)
    assert len(FULL.grid.cells()) >= 24 and FULL.rounds >= 6


def test_a_run_on_a_machine_that_changed_its_speed_is_told_to_be_none(machine: Machine) -> None:
    load = cases(machine, COST, SECONDS)[0]
    case = Case(load.workload, load.slo, QUICK.grid, SECONDS, 1.0)
    rig, speeds = LiveRig(machine, case, lambda: False), sweep_command.Speeds(machine, COST)
    with speeds.of("grid"):
        rig.measure(SMALL_STEPS.knobs, 3)
    assert speeds.said() == {"speed": {"grid": pytest.approx(1.0, abs=0.05)}, "drifted": False}
    slower = sweep_command.Speeds(machine, COST.scaled(compute=0.5, bandwidth=0.5, overhead=0.5))
    slower.found = dict(speeds.found)
    with slower.of("truth, round 0"):
        rig.measure(SMALL_STEPS.knobs, 4)
    assert slower.found["truth, round 0"] == pytest.approx(2.0, abs=0.1) and slower.said()["drifted"] is True


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (live_command.main, ["--case", "chats"], "choose from"),
        (live_command.main, ["--rounds", "0"], "0; it must be a whole number from 1 to 100"),
        (live_command.main, ["--duration", "x"], "x s; it must be 1 to 3600"),
        (sweep_command.main, ["--budget", "5"], "5 s; it must be 30 to 36000"),
        (sweep_command.main, ["--threads", "0"], "--threads: 0; it must be a whole number from 1 to 100"),
        (overhead.main, ["--steps", "3"], "--rounds is 7 and --steps 3; they must be at least 1 and 40"),
    ],
)
def test_nonsense_is_said_before_anything_is_loaded(
    main: Any, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("main", [live_command.main, sweep_command.main, overhead.main])
def test_without_vllm_it_says_what_to_do(
    main: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main([]) == 2
    assert "vllm is not installed for this Python" in capsys.readouterr().err


def test_every_process_gets_its_own_seed_of_prompts(machine: Machine) -> None:
    case = Case(cases(machine, COST, SECONDS)[0].workload, SLO(ttft_ms=100), QUICK.grid, SECONDS, 1.0)
    rigs = [LiveRig(machine, case, lambda: False) for _ in range(2)]
    assert len({partial(rig._prompts)() for rig in rigs for _ in range(3)}) == 6
