"""The KV pool belongs to a study: chosen once, kept, and refused where it no longer fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from autotune.engines.own import OwnSource
from autotune.profiling.pool import pool_of
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
    assert after.simulated[:12] == before.simulated
    both = before.measured.keys() & after.measured.keys()
    assert both and all(before.measured[key] == after.measured[key] for key in both), "nothing is measured again"
