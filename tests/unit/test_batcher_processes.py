"""Workers in processes of their own: what can be sent there, and ending one that hangs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from runtime import Batcher, batch
from runtime.batching import pool
from runtime.errors import RequestTimeoutError, StepFailedError

MODULE = """
import os, time
import torch
from runtime import batch

@batch(processes=True)
def square(items):
    return [(item * item, os.getpid()) for item in items]

class Twice(torch.nn.Module):
    def forward(self, x):
        return 2 * x

class Model:
    @batch(processes=True)
    def times(self, items):
        return items

def sleepy(items):
    if "hang" in items:
        time.sleep(3600)
    return [os.getpid() for _ in items]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "to_be_sent.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.delitem(sys.modules, "to_be_sent", raising=False)
    import to_be_sent  # type: ignore[import-not-found]

    found: ModuleType = to_be_sent
    return found


def test_a_decorated_function_and_a_bare_module_run_in_a_process(module: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    found = [f.result(120) for f in [module.square.submit(i) for i in range(4)]]
    assert [value for value, _ in found] == [0, 1, 4, 9]
    assert os.getpid() not in {pid for _, pid in found}
    module.square.close()

    with Batcher(module.Twice(), processes=True) as b:
        rows = list(b.map([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]))
    assert [row.tolist() for row in rows] == [[2.0, 4.0], [6.0, 8.0]]


def test_what_cannot_be_sent_is_refused_by_name(module: ModuleType) -> None:
    model = module.Model()
    with pytest.raises(ValueError, match=r"processes is set and fn is .*must be a plain function of a module"):
        model.times.submit(1)

    @batch(processes=True)
    def local(items: list[int]) -> list[int]:
        return items

    with pytest.raises(ValueError, match=r"processes is set and fn is .*local"):
        local.submit(1)


def test_a_process_that_hangs_is_ended_when_nobody_waits_for_it(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "KILL_AFTER_S", 0.05)
    b = Batcher(module.sleepy, processes=True, max_batch_size=1)
    first = b.submit("run").result(120)
    with pytest.raises(RequestTimeoutError):
        b.submit("hang", timeout_s=0.05).result(30)
    second = b.submit("run").result(120)  # in another process, for that one was ended
    assert second != first
    hangs = b.submit("hang")
    while not hangs.running():
        time.sleep(0.001)
    b.close(drain=False)
    with pytest.raises(StepFailedError, match="its worker died 1 times"):
        hangs.result(30)
