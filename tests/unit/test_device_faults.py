"""A device that is lost closes the engine; every other fault of a device stays with its request."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from runtime.errors import DeviceError, EngineClosedError, RejectedError, RequestTimeoutError, StepFailedError
from runtime.knobs import Knobs
from runtime.llm.core import EngineCore
from runtime.llm.output import OutputProcessor
from runtime.llm.scheduler import Scheduler
from runtime.records import FinishReason
from runtime.request import Request, SamplingParams
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.faults import device_error
from tests.engines import bench
from tests.unit.executor_harness import prompts, tiny

CPU = torch.device("cpu")
LOST = [
    torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("HIP error: misaligned address"),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
]
PASSING = [
    torch.AcceleratorError("CUDA error: invalid argument"),
    torch.AcceleratorError("CUDA error: out of memory"),
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("an illegal memory access is not what happened"),
    ValueError("CUDA error: device-side assert triggered"),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_errors_that_stay(error: RuntimeError) -> None:
    found = device_error(error, CPU)
    assert found is not None and str(error).partition("\n")[0] in str(found) and "\n" not in str(found)


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_errors_that_pass(error: Exception) -> None:
    assert device_error(error, CPU) is None


@pytest.mark.parametrize(("answers", "lost"), [(True, False), (False, True)])
def test_a_gpu_is_asked_whether_it_is_lost(answers: bool, lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: torch.device) -> None:
        if not answers:
            raise torch.AcceleratorError("CUDA error: some other error")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    error = RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx")
    assert (device_error(error, torch.device("cuda")) is not None) is lost


def test_a_step_on_a_lost_device_is_not_tried_in_parts() -> None:
    loaded = tiny()
    calls = []

    def fails(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        calls.append(kwargs["input_ids"].shape)
        raise LOST[0]

    loaded.model.register_forward_pre_hook(fails, with_kwargs=True)
    executor = TorchExecutor(loaded, kv_blocks=32)
    core = EngineCore(Scheduler(kv_blocks=32), executor, knobs=Knobs(), output=OutputProcessor())
    calls.clear()
    for i, prompt in enumerate(prompts([5, 9])):
        core.add(Request(str(i), tuple(prompt), SamplingParams(max_tokens=4), 4, 0.0))
    with pytest.raises(DeviceError, match="device-side assert triggered") as raised:
        core.step(0.0)
    assert len(calls) == 1 and raised.value.__cause__ is LOST[0]


def test_who_ends_in_the_very_step_that_loses_the_device_is_told_why_it_ended() -> None:
    """By its timeout: the record is heard too."""
    with bench(knobs=Knobs(max_batch_size=1)) as b:
        (stream,) = b.decoding(1)
        short = b.engine.submit([9], timeout_s=0.01)
        time.sleep(0.02)
        b.step()
        b.executor.error = DeviceError("cuda:0 cannot be used any more")
        b.executor.go()
        with pytest.raises(EngineClosedError):
            stream.result(timeout=30)
        with pytest.raises(RequestTimeoutError):
            short.result(timeout=30)
        assert {b.heard.request().reason for _ in range(2)} == {FinishReason.ERROR, FinishReason.TIMEOUT}


def test_it_closes_the_engine_and_everybody_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    with bench() as b:
        streams = b.decoding(2)
        late = b.engine.submit([9])
        b.executor.error = DeviceError("cuda:0 cannot be used any more")
        b.executor.go()
        for stream in (*streams, late):
            with pytest.raises(EngineClosedError, match="cuda:0 cannot be used any more") as raised:
                stream.result(timeout=30)
            assert isinstance(raised.value.__cause__, DeviceError)
        b.engine.close()
        assert b.engine.closed and isinstance(b.engine.error, DeviceError)
        for _ in range(2):
            with pytest.raises(RejectedError, match="the engine stopped: cuda:0 cannot be used any more") as refused:
                b.engine.submit([1])
            assert refused.value.reason == "closed"
        with pytest.raises(EngineClosedError, match="cuda:0"):
            b.engine.set_knobs(Knobs(max_batch_size=2))
    assert "the engine closes: cuda:0 cannot be used any more" in caplog.text


def test_another_error_of_a_step_fails_its_requests_alone() -> None:
    with bench() as b:
        streams = b.decoding(2)
        b.executor.error = RuntimeError("CUDA error: invalid argument")
        b.executor.go()
        for stream in streams:
            with pytest.raises(StepFailedError, match="invalid argument"):
                stream.result(timeout=30)
        b.executor.error = None
        assert b.engine.submit([1], max_tokens=2).result(timeout=30).token_ids
        assert b.engine.error is None and not b.engine.closed
