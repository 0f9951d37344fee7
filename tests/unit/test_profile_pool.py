"""The KV pool belongs to a study: chosen once, kept, and refused where it no longer fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from autotune.engines.own import OwnSource
from autotune.measure.evaluate import Interrupted
from autotune.profiling.points import Run
from autotune.profiling.pool import pool_of
from autotune.profiling.stages.context import Context, MeasurementRequest
from autotune.profiling.stages.validation import Validation
from autotune.profiling.study import open_study
from runtime.errors import InputError
from runtime.torch_backend import kv_pool
from runtime.tunable import ModelInfo
from tests.unit.profiled_machine import question, session

pytestmark = pytest.mark.unit
IDENTITY = {"q": 1}
LOADED = OwnSource(
    cast(
        Any,
        SimpleNamespace(
            device=torch.device("cpu"),
            kv_bytes_per_token=1 << 10,
            max_model_len=65536,
            info=ModelInfo("m", 1000, 65536, kv_bytes_per_token=1 << 10),
        ),
    )
)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def now(size: int) -> None:
        monkeypatch.setattr(kv_pool.psutil, "virtual_memory", lambda: SimpleNamespace(available=size, total=size))

    return now


def test_a_study_goes_on_with_the_pool_it_was_begun_with(tmp_path: Path, free: Callable[[int], None]) -> None:
    journal = tmp_path / "a.journal"
    free(1 << 30)
    with open_study(journal, IDENTITY) as study:
        begun = pool_of(study, LOADED, journal)
    assert begun == int((1 << 30) * kv_pool.CPU_SHARE) // (16 << 10) * 16
    for memory in (1 << 32, 1 << 29):  # more is free, and less
        free(memory)
        with open_study(journal, IDENTITY) as study:
            assert pool_of(study, LOADED, journal) == begun
    free(1 << 27)
    with open_study(journal, IDENTITY) as study, pytest.raises(InputError) as refused:
        pool_of(study, LOADED, journal)
    said = str(refused.value)
    assert said.startswith(f"{journal}: this study was begun with a KV pool of {begun} tokens (0.3 GiB), and 0.12 GiB")
    assert "--fresh" in said and "\n" not in said
    with open_study(journal, IDENTITY) as study:
        assert pool_of(study.restarted(IDENTITY), LOADED, journal) < begun


@pytest.mark.slow
def test_more_simulated_trials_go_on_with_a_finished_study(tmp_path: Path) -> None:
    journal, fewer, more = tmp_path / "a.journal", question(), question(sim_trials=18)
    before, _ = session(journal, fewer)
    with open_study(journal, IDENTITY) as study:
        assert study.exhausted(fewer.trials, fewer.budget_s, fewer.sim_trials)
        assert not study.exhausted(more.trials, more.budget_s, more.sim_trials)
        study.extend(more.budget_s, more.sim_trials)
    after, _ = session(journal, more)
    assert len(before.simulated) == 12 and len(after.simulated) == 18
    known = [run.setting for run in before.simulated]  # their values are by a cost model that has seen more
    assert [run.setting for run in after.simulated[:12]] == known
    assert before.measured.items() <= after.measured.items(), "nothing is lost, and nothing measured again"


@pytest.mark.slow
@pytest.mark.parametrize("rate", [35.0, None])
def test_settings_measured_before_an_extension_count(
    tmp_path: Path, rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a rate that is given, they can be compared only at the one that was found then. Interrupted, the extension comes
    to the same."""
    journal, other = tmp_path / "a.journal", tmp_path / "b.journal"
    fewer, more = question(rate=rate), question(rate=rate, sim_trials=40)
    before, _ = session(journal, fewer)
    with open_study(journal, IDENTITY) as study:
        study.extend(more.budget_s, more.sim_trials)
    other.write_bytes(journal.read_bytes())
    real, measured = Context._measure, []

    def measure(self: Any, request: MeasurementRequest, *rest: Any) -> Run:
        measured.append(request.key)
        if len(measured) == 1:
            raise Interrupted("interrupted")
        return real(self, request, *rest)

    concluding = Validation._conclude

    def conclude(self: Any) -> None:
        assert len({id(run) for _, run in self._runs}) == len(self._runs), "no measurement counts twice"
        concluding(self)

    monkeypatch.setattr(Validation, "_conclude", conclude)
    after, _ = session(journal, more)
    assert after.setup is not None and before.setup is not None and after.setup.rate == before.setup.rate
    assert before.expected.keys() < after.expected.keys() and before.measured.items() < after.measured.items()
    monkeypatch.setattr(Context, "_measure", measure)
    stopped, _ = session(other, more)
    assert stopped.stopped and before.measured.items() <= stopped.measured.items()
    again, _ = session(other, more)
    assert again.expected.keys() == after.expected.keys() and again.measured.keys() == after.measured.keys()
    assert before.measured.keys().isdisjoint(measured), "nothing is measured again"
