"""The engine and the batcher: live knobs, an SLO, and records of every step and request. Know nothing of autotune.

The names below are loaded when first used, and none but ``load_model`` loads torch; an :class:`Engine` does when it is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.batching.batcher import Batcher as Batcher
    from runtime.batching.decorator import batch as batch
    from runtime.batching.future import ItemFuture as ItemFuture
    from runtime.batching.largest import find_max_batch as find_max_batch
    from runtime.errors import AutotuneError as AutotuneError
    from runtime.errors import DeviceError as DeviceError
    from runtime.errors import EngineClosedError as EngineClosedError
    from runtime.errors import InputError as InputError
    from runtime.errors import LeaseError as LeaseError
    from runtime.errors import ModelError as ModelError
    from runtime.errors import RejectedError as RejectedError
    from runtime.errors import RequestCancelledError as RequestCancelledError
    from runtime.errors import RequestError as RequestError
    from runtime.errors import RequestTimeoutError as RequestTimeoutError
    from runtime.errors import StepFailedError as StepFailedError
    from runtime.errors import UnsupportedModelError as UnsupportedModelError
    from runtime.knobs import KnobLimits as KnobLimits
    from runtime.knobs import Knobs as Knobs
    from runtime.llm.admission import AdmissionPolicy as AdmissionPolicy
    from runtime.llm.buffer import TokenEvent as TokenEvent
    from runtime.llm.engine import Engine as Engine
    from runtime.llm.stream import Completion as Completion
    from runtime.llm.stream import Stream as Stream
    from runtime.records import FinishReason as FinishReason
    from runtime.records import LimitedBy as LimitedBy
    from runtime.records import RequestRecord as RequestRecord
    from runtime.records import StepRecord as StepRecord
    from runtime.request import SamplingParams as SamplingParams
    from runtime.slo import SLO as SLO
    from runtime.slo import RequestClass as RequestClass
    from runtime.torch_backend.loading import LoadedModel as LoadedModel
    from runtime.torch_backend.loading import load_model as load_model
    from runtime.tunable import Lease as Lease
    from runtime.tunable import Listener as Listener
    from runtime.tunable import SchedulerView as SchedulerView
    from runtime.tunable import StepPolicy as StepPolicy
    from runtime.tunable import Tunable as Tunable

_WHERE = {
    "runtime.batching.batcher": "Batcher",
    "runtime.batching.decorator": "batch",
    "runtime.batching.future": "ItemFuture",
    "runtime.batching.largest": "find_max_batch",
    "runtime.errors": (
        "AutotuneError DeviceError EngineClosedError InputError LeaseError ModelError RejectedError"
        " RequestCancelledError RequestError RequestTimeoutError StepFailedError UnsupportedModelError"
    ),
    "runtime.knobs": "KnobLimits Knobs",
    "runtime.llm.admission": "AdmissionPolicy",
    "runtime.llm.buffer": "TokenEvent",
    "runtime.llm.engine": "Engine",
    "runtime.llm.stream": "Completion Stream",
    "runtime.records": "FinishReason LimitedBy RequestRecord StepRecord",
    "runtime.request": "SamplingParams",
    "runtime.slo": "RequestClass SLO",
    "runtime.torch_backend.loading": "LoadedModel load_model",
    "runtime.tunable": "Lease Listener SchedulerView StepPolicy Tunable",
}
_MODULE = {name: module for module, names in _WHERE.items() for name in names.split()}

__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    module = _MODULE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE})
