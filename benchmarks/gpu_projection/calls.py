"""The calls of a step: the executor itself launches one, on tensors that have shapes and no content.

The model has all its layers, heads and options, and at first small widths, so that which layers can be fused is tried on a CPU
as anywhere else. Then its weights give way to ones of full size on PyTorch's ``meta`` device, which stands for the GPU, and the
CUDA backend takes over: its Triton kernels are noted instead of run, with their arguments, and PyTorch's operations by a dispatch
mode, composite ones taken apart. So what is counted is what this tree launches, not what somebody thinks it does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, Final, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

from benchmarks.gpu_projection.steps import Step
from benchmarks.gpu_projection.work import Work, of_kernel, of_operation
from runtime.torch_backend.attention import AttentionBackend
from runtime.torch_backend.backends import Backend
from runtime.torch_backend.contract import Loaded
from runtime.torch_backend.cuda import backend
from runtime.torch_backend.cuda.attention_plan import WAVES, AttentionPlan
from runtime.torch_backend.cuda.backend import CUDA, PagedAttention
from runtime.torch_backend.cuda.graphs import DecodeGraphs
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.kv_pool import KVPool
from runtime.torch_backend.loading import LoadedModel, from_model
from runtime.torch_backend.operations import HeadNorm, Operations
from runtime.torch_backend.presets import PRESETS, Preset, build_preset
from runtime.torch_backend.sampling import Sampler

GPU: Final = torch.device("meta")
BLOCK: Final = 16
_NARROW: Final = {"hidden_size": 96, "intermediate_size": 104, "vocab_size": 272}
"""Widths that nothing else of a model has, such as a head or all of them: wherever a weight has one, it is that width."""

_FREE: Final = {"empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "_unsafe_view", "detach"}


class Call(NamedTuple):
    """Something that the device does. ``bytes`` of its memory, read and written; ``flops`` on matrix units, padding included;
    ``known``: False where nobody has said what this kernel reads and writes, and all its tensors are counted."""

    name: str
    kind: str  # product, attention or other
    bytes: int
    flops: int
    shapes: tuple[tuple[int, ...], ...]
    known: bool


class Shape(NamedTuple):
    """Of a model. ``weights``: bytes that a step reads of them, the embedding left out where the head has its own."""

    name: str
    weights: int
    parameters: int
    kv_bytes_per_token: int
    layers: int
    kv_heads: int


class Replayed(NamedTuple):
    """A decode step that is recorded, behind the first. ``inside``: what its recording holds; ``replays``: how many recordings
    it replays; ``beside``: what is launched as well, where no row enters a block, and ``entering``, where all do."""

    inside: list[Call]
    replays: int
    beside: list[Call]
    entering: list[Call]


class _Notes:
    """A ``Capture`` that runs a step to see what it holds, and from then on notes by its size that it is replayed."""

    def __init__(self, recorder: Recorder) -> None:
        self.inside: dict[int, list[Call]] = {}
        self.replayed: list[int] = []
        self._recorder = recorder

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        assert isinstance(call, functools.partial)
        [size] = call.args
        for _ in range(2):  # the first one allocates, as where CUDA warms up
            self._recorder.calls.clear()
            call()
        self.inside[size] = list(self._recorder.calls)
        return functools.partial(self.replayed.append, size)

    def graphs(self, sizes: tuple[int, ...], step: Callable[[int], None], device: torch.device) -> DecodeGraphs:
        return DecodeGraphs(sizes, step, self)


class _Either(Operations):
    """PyTorch's own operations while layers are tried on the CPU, then those of a GPU."""

    def __init__(self) -> None:
        self.now = Operations()

    def norm(self, *args: Any) -> Tensor:
        return self.now.norm(*args)

    def add_norm(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self.now.add_norm(*args)

    def rope_write(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self.now.rope_write(*args)

    def silu_mul(self, *args: Any) -> Tensor:
        return self.now.silu_mul(*args)

    def linear(self, *args: Any) -> Tensor:
        return self.now.linear(*args)

    def silu_mul_linear(self, *args: Any) -> Tensor:
        return self.now.silu_mul_linear(*args)


class Decoder:
    """The model ``preset`` behind an executor on the GPU that is not there.

    Raises ``ValueError`` for a model whose layers are not all fused: its calls would be those of transformers' code.
    """

    def __init__(self, preset: str) -> None:
        wide = PRESETS[preset]
        narrow = Preset(wide.name, wide.model_type, 0, wide.doc, {**wide.fields, **_NARROW})
        model = build_preset(narrow, device=torch.device("cpu"), dtype=torch.bfloat16)
        loaded = from_model(model, name=preset)
        self._operations = _Either()
        backend = Backend(self._operations, _attention, CUDA.lay_out)
        self._executor = TorchExecutor(_unclaimed(loaded), kv_blocks=1, block_size=BLOCK, backend=backend)
        if self._executor._chain is None:
            raise ValueError(f"model {preset}: not all of its layers are fused, so its calls cannot be counted here")
        self._operations.now = CUDA.operations
        fields = wide.fields
        _widen(self._executor, {_NARROW[name]: int(fields[name]) for name in _NARROW})
        layer = 2 * int(fields["num_key_value_heads"]) * int(fields["head_dim"]) * 2  # bytes of a token, bfloat16
        embedding = 0 if fields["tie_word_embeddings"] else int(fields["vocab_size"]) * int(fields["hidden_size"])
        layers = int(fields["num_hidden_layers"])
        self.shape = Shape(
            preset,
            2 * (wide.parameters - embedding),
            wide.parameters,
            layers * layer,
            layers,
            int(fields["num_key_value_heads"]),
        )
        self._vocab = int(fields["vocab_size"])

    def calls(self, step: Step, multiprocessors: int) -> list[Call]:
        """What a greedy ``step`` asks of a GPU with so many multiprocessors, once everything has been seen before."""
        engine = self._placed(KVPool(step.blocks(BLOCK), BLOCK), multiprocessors)
        plan = step.plan(BLOCK)
        recorder = Recorder(step)
        # decode steps are recorded, with the launch that merges, whether or not this one has something to merge
        plans = functools.partial(AttentionPlan, recorded=max(step.new) == 1)
        with _noted(recorder), mock.patch.object(backend, "AttentionPlan", plans):
            for _ in range(2):  # the first one allocates
                recorder.calls.clear()
                with recorder:
                    engine.launch(plan)
                    result = engine.collect()
        if result.failed:
            raise result.failed[0][1]
        return recorder.calls

    def replayed(self, batch: int, context: int, multiprocessors: int) -> Replayed | None:
        """A greedy step of ``batch`` decodes with ``context`` tokens each, recorded as in service; None where this tree records
        none."""
        step = Step.decodes(*[context] * batch)
        engine = self._placed(KVPool(step.blocks(BLOCK, 2 * BLOCK), BLOCK, scratch=True), multiprocessors)
        plan, recorder = step.plan(BLOCK, 2 * BLOCK), Recorder(step)
        notes, found = _Notes(recorder), list[list[Call]]()
        recording = CUDA._replace(record=CUDA.record and notes.graphs)
        try:
            with _noted(recorder), recorder:
                engine._resident = engine._record(recording, batch)
                if engine._resident is None:
                    return None
                for at in range(BLOCK + 1):  # behind the first, which brings the rows there, one has them enter a block
                    recorder.calls.clear()
                    engine.launch(plan._replace(step=at))
                    result = engine.collect()
                    if result.failed:
                        raise result.failed[0][1]
                    found.append(list(recorder.calls))
        finally:
            engine._resident = None
        entering = 1 + (-context) % BLOCK  # the step whose tokens are the first of a block
        beside = found[entering + 1 if entering < BLOCK else 1]
        return Replayed(notes.inside[notes.replayed[-1]], len(notes.replayed) // len(found), beside, found[entering])

    def _placed(self, pool: KVPool, multiprocessors: int) -> TorchExecutor:
        """The executor over ``pool``, on a GPU with so many multiprocessors."""
        engine = self._executor
        engine.pool, engine.device = pool, GPU
        engine.sampler = getattr(CUDA, "sampler", Sampler)(self._vocab, GPU, 0)
        splits = -(-WAVES * multiprocessors // self.shape.kv_heads)  # as plan_sizes has it on a GPU
        engine.attention = PagedAttention(pool, GPU, splits=splits)
        engine._rows.forget()
        engine._rows.pad_block = pool.pad_block
        return engine


def _attention(pool: KVPool, loaded: Loaded) -> AttentionBackend:
    return PagedAttention(pool, loaded.device)


def _unclaimed(loaded: LoadedModel) -> LoadedModel:
    """Without layers that the pool would allocate on the CPU."""
    return dataclasses.replace(loaded, kv_layers=())


def _widen(executor: TorchExecutor, widths: dict[int, int]) -> None:
    """Put weights of full width, without content, in the place of those that ``executor`` has."""
    known = dict(widths)
    known |= {2 * _NARROW["intermediate_size"]: 2 * widths[_NARROW["intermediate_size"]]}  # gate and up, merged
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, lest another gets its id

    def wide(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            shape = [known.get(size, size) for size in tensor.shape]
            made[id(tensor)] = tensor, torch.empty(shape, dtype=tensor.dtype, device=GPU)
        return made[id(tensor)][1]

    for module in executor.loaded.model.modules():
        kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for held in kinds:
            for name, value in list(held.items()):
                if isinstance(value, Tensor):
                    held[name] = wide(value)
                elif isinstance(value, HeadNorm):
                    held[name] = HeadNorm(wide(value.query), wide(value.key), wide(value.each), value.eps)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Notes what runs on the device, but for views and allocations. A copy to the host of what has no content yields zeros."""

    def __init__(self, step: Step) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._step = step

    def kernel(self, kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        """A Triton kernel is launched."""
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        name = str(kernel.__name__)
        kind = "attention" if name in ("_attend", "_merge") else "other"
        self._note(name, kind, of_kernel(name, given, grid, self._step), _tensors(given.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        given = _tensors([*args, *kwargs.values()])
        out = _copied_to_host(name, func, args, kwargs)
        out = func(*args, **kwargs) if out is None else out
        produced = _tensors([out])
        returned = func._schema.returns
        view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        if not view and name not in _FREE and any(x.device == GPU for x in (*given, *produced)):
            work = of_operation(name, given, produced)
            self._note(name, "product" if work.flops else "other", work, given)
        return out

    def _note(self, name: str, kind: str, work: Work, tensors: Seq[Tensor]) -> None:
        shapes = tuple(tuple(x.shape) for x in tensors)
        self.calls.append(Call(name, kind, work.read + work.written, work.flops, shapes, work.known))


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _copied_to_host(name: str, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    if name not in ("to", "_to_copy"):
        return None
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    source, to = given["self"], given.get("device")
    if source.device != GPU or to is None or torch.device(to) == GPU:
        return None
    size = source.numel() * source.dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(source.dtype).view(source.shape)


@contextlib.contextmanager
def _noted(recorder: Recorder) -> Iterator[None]:
    """Triton kernels go to ``recorder``; composite operations are taken apart, which inference mode would not do; and memory is
    pinned without a driver."""

    def launched(kernel: Any, grid: Any) -> Any:
        return functools.partial(recorder.kernel, kernel, grid)

    draw = Sampler.draw
    with (
        mock.patch.object(KernelInterface, "__getitem__", launched),
        mock.patch.object(torch, "inference_mode", torch.no_grad),
        mock.patch.object(Sampler, "draw", getattr(draw, "__wrapped__", draw)),
        mock.patch.object(Tensor, "pin_memory", lambda self: self),
        torch.no_grad(),
    ):
        yield
