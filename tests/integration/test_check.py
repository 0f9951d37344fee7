"""``autotune check`` on the real engine: a profile just measured fits, one of another speed does not.

The model computes; how long its steps take is a formula's, on a clock that only they move. So nothing here depends on how fast
or busy the machine is, but for the one test of the slow tier on its own clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runtime.clock
import runtime.llm.engine
from autotune.cli.main import run
from autotune.cli.target import model_facts, with_threads
from autotune.cost.model import CostModel, fit_cost_model
from autotune.engines import Engine as Measured
from autotune.profile import CostFacts, KvPool, Profile, save_profile
from autotune.profile.fingerprint import OtherWork, machine, software
from autotune.profiling.steps import measure_steps
from autotune.simulate import SimulatedEngine
from runtime.clock import VirtualClock
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.engine import Engine
from runtime.llm.plan import StepPlan, StepResult
from runtime.step_model import StepFeatures
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.loading import LoadedModel, load_model
from tests.integration.llama_folder import llama_folder
from tests.sample_profile import sample_profile

LIMITS = KnobLimits(max_batch_size=64, max_wait_ms=100, token_budget=512, chunk_size=512)
KV_TOKENS = 8192


class Formula:
    """Seconds of a step."""

    def predict(self, step: StepFeatures) -> float:
        reads = step.decode_context + step.prefill_context
        return 6e-3 + 4e-4 * step.decodes + 1.2e-4 * step.prefill_tokens + 4e-7 * reads


class Hardware:
    """Steps that the real executor computes take what the formula says, times ``pace``."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.pace = 1.0
        self._compute = TorchExecutor.execute

    def execute(self, executor: TorchExecutor, plan: StepPlan, now: float, until: float) -> StepResult:
        result = self._compute(executor, plan, now, until)
        tokens = sum(chunk.count for chunk in plan.chunks)
        reads = sum(chunk.start + chunk.count for chunk in plan.chunks)
        step = StepFeatures(plan.n_decode, plan.decode_context, tokens, reads, 0, len(plan.chunks))
        self.clock.advance(self.pace * Formula().predict(step))
        return result._replace(ends=(self.clock.now(),))


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hardware]:
    made = Hardware()
    monkeypatch.setattr(TorchExecutor, "execute", lambda *step: made.execute(*step))
    for module in (runtime.clock, runtime.llm.engine):
        monkeypatch.setattr(module, "MonotonicClock", lambda: made.clock)
    monkeypatch.setattr(OtherWork, "taken", lambda self, threads: 0.0)
    yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a Llama of two small layers."""
    path = tmp_path_factory.mktemp("models") / "small"
    llama_folder(path, vocabulary=320, hidden=32, intermediate=64, context=1024)
    return str(path)


@pytest.fixture(scope="module")
def measured(model: str) -> Profile:
    """The profile of a machine that takes what the formula says."""
    engine = SimulatedEngine(Formula(), kv_tokens=KV_TOKENS, limits=LIMITS)
    return calibrated(load_model(model, dtype="float32", device="cpu"), engine)


def calibrated(loaded: LoadedModel, engine: Measured) -> Profile:
    """A profile with a cost model just calibrated by the engine's clock."""
    facts = model_facts(loaded.info, 0)
    points = measure_steps(engine, facts, budget_s=4, seed=0).points
    return sample_profile(
        {"balanced": Knobs(16, 0, 128, 128)},
        machine=with_threads(machine()),
        software=software(),
        model=facts,
        cost_model=fit_cost_model(points, seconds=4).facts,
        engine={"kv_pool": KvPool(block_size=16, blocks=KV_TOKENS // 16), "limits": LIMITS},
    )


def check(profile: Profile, folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What ``autotune check --json`` says; its exit code must say the same."""
    save_profile(profile, folder / "small.yaml")
    before = (folder / "small.yaml").read_bytes()
    code = run(["check", str(folder / "small.yaml"), "--json", *words])
    out, error = capsys.readouterr()
    assert code in (0, 1), error
    told: dict[str, Any] = json.loads(out)
    assert code == (0 if told["verdict"] == "fits" else 1)
    assert (folder / "small.yaml").read_bytes() == before and "Traceback" not in error
    return told


@pytest.mark.slow
@pytest.mark.beside
def test_it_fits_right_after_it_was_measured_and_not_once_the_machine_is_slower(
    measured: Profile, hardware: Hardware, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = check(measured, tmp_path, capsys, "--budget", "2s")
    assert told["verdict"] == "fits", told["sentence"]
    assert {r["region"] for r in told["regions"]} >= {"decode", "prefill", "mixed"}
    assert told["elsewhere"] == "" and told["software"] == told["engine"] == []
    hardware.pace = 1.25
    told = check(measured, tmp_path, capsys, "--budget", "2s")
    assert told["sentence"].startswith("stale: ") and "slower than the profile" in told["sentence"]
    assert all(r["difference"] == pytest.approx(0.25, abs=0.08) for r in told["regions"])


@pytest.mark.slow
@pytest.mark.beside
def test_a_profile_that_claims_thirty_times_the_speed_is_stale(
    measured: Profile, hardware: Hardware, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured.cost_model is not None
    fast = CostModel(measured.cost_model).scaled(compute=30, bandwidth=30, overhead=30)
    told = check(measured.model_copy(update={"cost_model": fast.facts}), tmp_path, capsys, "--budget", "1s")
    assert all(r["difference"] == pytest.approx(29, rel=0.2) for r in told["regions"])
    assert told["sentence"].startswith("stale: ")


@pytest.mark.slow
def test_on_the_machines_own_clock(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other programs may make steps several times as long, and the verdict with them: never thirty times."""
    loaded = load_model(model, dtype="float32", device="cpu")
    with Engine(loaded, limits=LIMITS, kv_tokens=KV_TOKENS, threads=1) as engine:
        made = calibrated(loaded, engine)
    told = check(made, tmp_path, capsys, "--budget", "2s")
    assert {r["region"] for r in told["regions"]} >= {"decode", "prefill", "mixed"}
    assert all(-0.95 < r["difference"] < 20 for r in told["regions"]), told["sentence"]


def test_another_model_in_its_place_is_found_out(
    measured: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = measured.model_copy(update={"model": measured.model.model_copy(update={"parameters": 5})})
    save_profile(other, tmp_path / "p.yaml")
    assert run(["check", str(tmp_path / "p.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: model {measured.model.name}: parameters is ") and error.count("\n") == 1
    assert "the profile's model has 5: it is another one (--model says where the profile's is)" in error


def test_for_people_it_is_a_table_and_a_sentence(
    measured: Profile, hardware: Hardware, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured.cost_model is not None
    recorded = CostFacts.model_validate(
        measured.cost_model.model_dump(mode="json") | {"graph_sizes": (4, 8), "planned": None}
    )
    older = measured.model_copy(
        update={
            "software": measured.software.model_copy(update={"torch": "2.0.0"}),
            "cost_model": recorded,
            "warnings": ("other programs used 1.4 cores while it was measured",),
        }
    )
    save_profile(older, tmp_path / "p.yaml")
    run(["check", str(tmp_path / "p.yaml"), "--budget", "1s"])
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(("fits: ", "stale: ", "cannot tell: "))
    assert f"note: torch {software().torch} instead of 2.0.0" in out
    assert (
        "note: profile was measured with CUDA graphs of 2 sizes up to 8 rows, this engine has no CUDA graphs: "
        "1 decode alone ran as 4 rows there and runs launch by launch here\n"
    ) in out
    assert (
        "warning: other programs used 1.4 cores while it was measured; profile again when nothing else runs on this machine"
        in out
    )
    for word in ("decode", "prefill", "measured", "profile says", "difference"):
        assert word in out
