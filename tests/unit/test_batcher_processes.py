"""Workers in processes of their own: what can be sent there, and ending one that hangs."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from runtime import Batcher, batch
from runtime.batching import batcher, pool, process_worker
from runtime.batching.invoke import WorkerDied
from runtime.batching.process_worker import ProcessWorker
from runtime.clock import VirtualClock
from runtime.errors import RequestTimeoutError, StepFailedError

MODULE = """
import os, time
from runtime import batch

@batch(processes=True)
def square(items):
    return [(item * item, os.getpid()) for item in items]

class Model:
    @batch(processes=True)
    def times(self, items):
        return items

class Unreadable:
    def __reduce__(self):
        return (unreadable, ())

def unreadable():
    raise OSError("cannot be read back")

def answers(items):
    return [Unreadable() if item == "unreadable" else os.getpid() for item in items]

def sleepy(items):
    if "hang" in items:
        time.sleep(3600)
    return [os.getpid() for _ in items]
"""

WITH_TORCH = """
import torch

class Twice(torch.nn.Module):
    def forward(self, x):
        return 2 * x
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "to_be_sent.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.delitem(sys.modules, "to_be_sent", raising=False)
    monkeypatch.delitem(sys.modules, "with_torch", raising=False)
    import to_be_sent  # type: ignore[import-not-found]

    found: ModuleType = to_be_sent
    return found


@pytest.mark.slow
def test_a_decorated_function_and_a_bare_module_run_in_a_process(module: ModuleType, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "with_torch.py").write_text(WITH_TORCH)
    found = [f.result(120) for f in [module.square.submit(i) for i in range(4)]]
    assert [value for value, _ in found] == [0, 1, 4, 9]
    assert os.getpid() not in {pid for _, pid in found}
    module.square.close()

    twice = importlib.import_module("with_torch").Twice()
    with Batcher(twice, processes=True) as b:
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


def test_a_kill_that_comes_when_its_call_is_over_spares_the_next(module: ModuleType) -> None:
    worker = ProcessWorker(module.sleepy)
    worker.begin()
    [first] = worker(["run"])
    worker.kill()  # the time-out was noticed before the call was known to be over
    worker.begin()
    assert worker(["run"]) == [first]
    worker.close()


def test_a_signal_handler_may_kill_within_a_kill(module: ModuleType) -> None:
    worker = ProcessWorker(module.sleepy)
    kills: list[int] = []

    def handler() -> None:
        kills.append(1)
        if len(kills) == 1:
            assert worker._lock.acquire(blocking=False), "its own thread holds it"
            worker._lock.release()
            worker.kill()

    worker._process, worker._calling = SimpleNamespace(kill=handler), True
    worker.kill()
    assert kills == [1, 1]


def test_a_kill_that_comes_with_the_answer_costs_the_next_call_nothing(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ProcessWorker(module.sleepy)

    def loads(data: bytes) -> Any:
        worker.kill()
        return pickle.loads(data)

    worker.begin()
    with monkeypatch.context() as patched:
        patched.setattr(process_worker, "pickle", SimpleNamespace(loads=loads, dumps=pickle.dumps))
        [first] = worker(["run"])
    assert worker.pid is None, "it is known to be gone"
    worker.begin()
    [second] = worker(["run"])
    assert second != first
    worker.close()


def test_a_kill_before_the_process_runs_is_not_forgotten(module: ModuleType) -> None:
    worker = ProcessWorker(module.sleepy)
    worker.begin()
    worker.kill()
    with pytest.raises(WorkerDied):
        worker(["hang"])

    class Killing:
        """A context whose processes are killed for before they have started."""

        def __init__(self, context: Any) -> None:
            self.Pipe = context.Pipe
            self._made = context.Process

        def Process(self, **options: Any) -> Any:
            process = self._made(**options)
            worker.kill()
            return process

    worker._context = Killing(worker._context)
    worker.begin()
    with pytest.raises(WorkerDied):
        worker(["hang"])
    assert worker.pid is None


def test_an_item_behind_one_that_timed_out_runs(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call's answer has come, its only item has timed out, and the process is to be killed: the next call has it."""
    answered, killed = threading.Event(), threading.Event()

    class Slow(ProcessWorker):
        def __call__(self, items: list[Any]) -> Any:
            found = super().__call__(items)
            if items == ["late"]:
                answered.set()
                assert killed.wait(30), "nobody ended a call that nobody waits for"
            return found

        def kill(self) -> None:
            super().kill()
            killed.set()

    monkeypatch.setattr(batcher, "ProcessWorker", Slow)
    clock = VirtualClock()
    with Batcher(module.sleepy, processes=True, max_batch_size=1, retries=0, clock=clock) as b:
        late, behind = b.submit("late", timeout_s=100), b.submit("run")
        assert answered.wait(120)
        clock.advance(200.0)
        with b._pool.lock:
            b._pool._timekeeper.look()
        with pytest.raises(RequestTimeoutError):
            late.result(30)
        assert behind.result(120)


def test_what_cannot_be_sent_or_read_is_no_death_of_the_process(module: ModuleType) -> None:
    class Unsendable:
        def __reduce__(self) -> Any:
            raise EOFError("cannot be sent")

    with Batcher(module.answers, processes=True, strategy="dynamic", max_batch_size=1) as b:
        pid = b.submit("run").result(120)
        with pytest.raises(OSError, match="cannot be read back"):
            b.submit("unreadable").result(120)
        with pytest.raises(EOFError, match="cannot be sent"):
            b.submit(Unsendable()).result(120)
        assert b.submit("run").result(120) == pid
