"""What a step takes, by how many sequences it holds and how long they are: beside its memory floor, in launches and in waits."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from benchmarks.gpu.parts.ceilings import copy_rate
from benchmarks.gpu.place import LeftOutError, Place, synchronized
from benchmarks.gpu_projection.steps import Step
from runtime.errors import DeviceError
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.kv_pool import default_kv_blocks
from runtime.torch_backend.loading import LoadedModel, load_model

BLOCK: Final = 16
HEADROOM: Final = 64  # tokens that a sequence may grow by: more than steps that are measured
_DRIVER: Final = (
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cudaGraphLaunch",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
    "Synchronize",
)


def cases(dry: bool) -> dict[str, Step]:
    if dry:
        return {
            "decode 1 × 20": Step.decodes(20), "decode 4 × 20": Step.decodes(*[20] * 4), "skewed": Step.decodes(90, 5, 6),
            "too large": Step.decodes(10**9), "prompt": Step((33,), (33,)), "mixed": Step((1, 1, 9), (20, 20, 9)),
        }  # fmt: skip
    found = {
        f"decode {batch} × {context}": Step.decodes(*[context] * batch)
        for batch in (1, 8, 64, 256)
        for context in (128, 1024, 8192)
    }
    found["decode 64, skewed"] = Step.decodes(8192, *range(100, 163))
    found["prompt of 2048"] = Step((2048,), (2048,))
    found["prompt of 512 behind 4096"] = Step((512,), (4608,))
    found["64 decodes and 512 of a prompt"] = Step((1,) * 64 + (512,), (1024,) * 64 + (512,))
    return found


def run(place: Place, model: str) -> None:
    loaded = load_model(place.model(model), dtype=place.dtype(), device=place.device)
    rate = place.earlier("ceilings", "copy_bytes_per_s") or copy_rate(loaded.device, 4 << 20 if place.dry else 4 << 30)
    flops = place.earlier("ceilings", "matmul_flops")
    place.keep("model", {"name": loaded.name, "bandwidth": rate, "matmul_flops": flops})
    known = Known(weight_bytes(loaded), layer_parameters(loaded), loaded.kv_bytes_per_token, rate, flops)
    chosen = cases(place.dry)
    fit, blocks = fitting(place, chosen, 64 if place.dry else default_kv_blocks(loaded, BLOCK))
    recorded: dict[str, Any] = {"max_batch_size": 256, "token_budget": 4096}
    executor = TorchExecutor(loaded, kv_blocks=blocks, block_size=BLOCK, **recorded)
    failed = []
    for name, step in fit.items():
        try:
            found = measured(executor, known, step, 2 if place.dry else 20)
        except DeviceError:
            raise
        except Exception as error:
            failed.append(name)
            found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        place.keep(name, found)
        if "failed" in found:  # out of the except block, so that the frames that raised can be freed
            del executor  # and with it the pool, before there is another whose state is whole
            gc.collect()
            if loaded.device.type == "cuda":
                torch.cuda.empty_cache()
            executor = TorchExecutor(loaded, kv_blocks=blocks, block_size=BLOCK, **recorded)
    if failed:
        raise RuntimeError(f"{len(failed)} steps failed: {', '.join(failed)}")


def fitting(place: Place, steps: Mapping[str, Step], capacity: int, kind: str = "") -> tuple[dict[str, Step], int]:
    """Those of ``steps`` that ``capacity`` KV blocks hold, and how many blocks they take; of the others it is kept that they are
    left out, under their names behind ``kind``. Raises :class:`LeftOutError` where none fits."""
    needed = {name: step.blocks(BLOCK, HEADROOM) for name, step in steps.items()}
    for name, step in steps.items():
        if needed[name] > capacity:
            said = f"its {sum(step.context)} tokens of context do not fit beside the weights"
            place.keep(f"{kind}{name}", {"left_out": said})
    found = {name: step for name, step in steps.items() if needed[name] <= capacity}
    if not found:
        raise LeftOutError(f"{kind}no step fits the {capacity} KV blocks that there is memory for")
    return found, max(needed[name] for name in found)


class Known(NamedTuple):
    """Of a model and its device. ``weights``: bytes that a step reads of them; ``layers``: parameters, embedding and head left
    out; ``kv``: bytes of a token of context; ``rate``: bytes/s of a copy; ``flops``: of products a second, if measured."""

    weights: int
    layers: int
    kv: int
    rate: float
    flops: float | None


def measured(executor: TorchExecutor, known: Known, step: Step, repeats: int) -> dict[str, Any]:
    """Milliseconds of launching and collecting ``step``, its memory floor, and what it asks of the driver."""
    whole, device = step.plan(BLOCK, HEADROOM), executor.device
    plans = (whole._replace(step=number) for number in range(HEADROOM))  # as in service, each step a token further
    found: dict[str, Any] = {}
    begun = time.perf_counter()
    _whole(executor, next(plans))
    found["first_ms"] = round((time.perf_counter() - begun) * 1e3, 2)  # compiles its kernels, or captures a graph
    for _ in range(3):
        _whole(executor, next(plans))
    launching, all_of_it, host = [], [], time.process_time()
    for _ in range(repeats):
        synchronized(device)
        begun = time.perf_counter()
        executor.launch(next(plans))
        launched = time.perf_counter()
        executor.collect()
        all_of_it.append(time.perf_counter() - begun)
        launching.append(launched - begun)
    found["host_ms"] = round((time.process_time() - host) / repeats * 1e3, 3)
    seconds = statistics.median(all_of_it)
    found["ms"], found["launch_ms"] = round(seconds * 1e3, 3), round(statistics.median(launching) * 1e3, 3)
    floor = (known.weights + sum(step.context) * known.kv) / known.rate
    found["floor_ms"], found["over_floor"] = round(floor * 1e3, 3), round(seconds / floor, 3)
    if known.flops and max(step.new) > 1:
        found["share_of_matmul_peak"] = round(2 * sum(step.new) * known.layers / seconds / known.flops, 3)
    if device.type == "cuda":
        found |= _waits(executor, next(plans)) | _profiled(executor, next(plans))
    if getattr(executor, "overlaps", False):
        found["overlapped_ms"] = round(_overlapped(executor, plans, repeats) * 1e3, 3)
    return found


def _overlapped(executor: TorchExecutor, plans: Iterator[Any], repeats: int) -> float:
    """Seconds a step where the next one is launched before the last one is collected."""
    executor.launch(next(plans))
    begun = time.perf_counter()
    for _ in range(repeats):
        executor.launch(next(plans))
        executor.collect()
    seconds = (time.perf_counter() - begun) / repeats
    executor.collect()
    return seconds


def _whole(executor: TorchExecutor, plan: Any) -> None:
    executor.launch(plan)
    result = executor.collect()
    if result.failed:
        raise result.failed[0][1]


def weight_bytes(loaded: LoadedModel) -> int:
    """Bytes of weights that a step reads: all but an embedding that is no head as well."""
    model: Any = loaded.model
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    whole = sum(parameter.nbytes for parameter in _once(model))
    return whole - (0 if head is embedding else int(embedding.nbytes))


def layer_parameters(loaded: LoadedModel) -> int:
    """Without embedding and head."""
    model: Any = loaded.model
    ends = {id(x.weight): x.weight.numel() for x in (model.get_input_embeddings(), model.get_output_embeddings())}
    return sum(parameter.numel() for parameter in _once(model)) - int(sum(ends.values()))


def _once(model: Any) -> list[torch.Tensor]:
    return list({id(parameter): parameter for parameter in model.parameters()}.values())


def _waits(executor: TorchExecutor, plan: Any) -> dict[str, Any]:
    """Whether the host waits for the device while it launches, in which case PyTorch raises and the executor keeps the cause."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        executor.launch(plan)
        launched: Any = getattr(executor, "_launched", None)
        cause = getattr(launched[-1] if isinstance(launched, deque) else launched, "cause", None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    executor.collect()
    return {"waits_in_launch": None if cause is None else " ".join(str(cause).split())[:300]}


def _profiled(executor: TorchExecutor, plan: Any) -> dict[str, Any]:
    """One step under PyTorch's profiler: what the host asks of the driver, and the kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        executor.launch(plan)
        executor.collect()
        torch.cuda.synchronize()
    calls, times, kernels = Counter[str](), Counter[str](), 0
    for event in seen.events():
        if str(event.device_type).endswith("CUDA"):
            kernels += 1
            times[event.name[:60]] += event.time_range.elapsed_us()
        elif any(name in event.name for name in _DRIVER):
            calls[event.name] += 1
    longest = {name: round(us, 1) for name, us in times.most_common(8)}
    return {
        "kernels": kernels,
        "kernels_ms": round(sum(times.values()) / 1e3, 3),
        "driver": dict(calls),
        "longest_us": longest,
    }
