"""The packed step by our GPU kernels, which run interpreted where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.6", reason="the GPU kernels need Triton 3.6 or newer")

from triton.runtime.interpreter import GridExecutor

from runtime.knobs import Knobs
from runtime.llm.plan import StepPlan
from runtime.torch_backend import executor as executor_module
from runtime.torch_backend.backends import Backend
from runtime.torch_backend.cuda import activation, attention, norm, rope, sampling
from runtime.torch_backend.cuda import backend as backend_module
from runtime.torch_backend.cuda.backend import CUDA, PagedAttention
from runtime.torch_backend.cuda.language import INTERPRETED
from runtime.torch_backend.cuda.sampler import KernelSampler
from runtime.torch_backend.cuda.tiles import LinearTile
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.fused_layer import FusedLayer
from runtime.torch_backend.self_test import self_test
from tests.unit.executor_harness import prompts, reference, run, tiny
from tests.unit.step_operations import Counted, put_elsewhere
from tests.unit.test_self_test import loaded_model
from tests.unit.test_step_operations import SAMPLED, decode_step, mixed_step, operations

pytestmark = pytest.mark.skipif(
    not INTERPRETED.value, reason="these models lie on the CPU, where kernels must be interpreted"
)
FEW = Backend(
    CUDA.operations, lambda pool, loaded: PagedAttention(pool, loaded.device, splits=3), CUDA.lay_out, fp8=CUDA.fp8
)
"""Few parts of contexts, since the interpreter runs even those that have nothing to do."""


SLOW = (pytest.mark.slow,)


def test_kernels_of_an_unfused_model_are_the_same_for_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its query is put together by heads, so that a stride would follow the tokens, and a stride is a constant of the kernel."""
    strides: set[tuple[int, ...]] = set()
    seen: set[int] = set()

    def attended(query: torch.Tensor, *args: Any, out: torch.Tensor, **options: Any) -> None:
        if len(query) > 1:
            seen.add(len(query))
            strides.add(query.stride())
        out.zero_()

    monkeypatch.setattr(backend_module, "paged_attention", attended)
    monkeypatch.setattr(backend_module, "attend", attended)
    loaded = tiny("gpt_oss", sliding_window=9, num_local_experts=4, num_experts_per_tok=2)
    executor = TorchExecutor(loaded, kv_blocks=12, block_size=8, backend=FEW)
    work = list(zip(prompts([3, 9, 8], seed=5), [3, 2, 3], strict=True))
    run(executor, work, Knobs(max_batch_size=3, token_budget=12, chunk_size=12))
    assert len(strides) == 1 and len(seen) > 2


@pytest.mark.parametrize(
    ("model_type", "changes", "fused"),
    [
        ("qwen3", {}, True),
        pytest.param("llama", {}, True, marks=SLOW),
        pytest.param("mistral", {"sliding_window": 9}, True, marks=SLOW),
        pytest.param(
            "gemma2",
            {"sliding_window": 9, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
            False,
            marks=SLOW,
        ),
        pytest.param(
            "gpt_oss", {"sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2}, False, marks=SLOW
        ),
        pytest.param("llama", {"head_dim": 272, "hidden_size": 16}, True, marks=SLOW),  # larger than the kernel takes
    ],
)
@pytest.mark.slow
def test_greedy_tokens_are_those_of_generate(model_type: str, changes: dict[str, Any], fused: bool) -> None:
    loaded = tiny(model_type, **changes)
    work = list(zip(prompts([3, 19, 8], seed=5), [3, 2, 3], strict=True))
    expected = [reference(loaded, p, n) for p, n in work]
    executor = TorchExecutor(loaded, kv_blocks=12, block_size=8, backend=FEW)
    assert any(isinstance(m, FusedLayer) for m in loaded.model.modules()) is fused
    outputs, failures, _ = run(executor, work, Knobs(max_batch_size=3, token_budget=24, chunk_size=12))
    assert not failures
    assert outputs == expected


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3", pytest.param("llama", marks=SLOW)])
def test_a_layer_is_nine_launches(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels and PyTorch's: four products, two sums with norms, rotation with the write, attention, gate. No context is long
    enough for parts, so nothing is merged."""
    count, call = Counted(), GridExecutor.__call__

    def counted(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        with count.one(self.fn.__name__):
            return call(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    steps = []
    for layers in (1, 2):
        loaded = tiny(model_type, num_hidden_layers=layers)
        executor = TorchExecutor(loaded, kv_blocks=40, block_size=4, backend=FEW)
        steps.append(operations(executor, decode_step(), count))
    assert len(steps[1]) - len(steps[0]) == 9
    assert {name: steps[0].count(name) for name in ("_rms_norm", "_rope_write", "_attend", "_merge", "_gated")} == {
        "_rms_norm": 3, "_rope_write": 1, "_attend": 1, "_merge": 0, "_gated": 1,
    }  # fmt: skip


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("plan", [decode_step, mixed_step])
def test_the_first_launch_of_a_size_waits_for_nothing(
    plan: Callable[..., StepPlan], params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold: work lists are made in it. The kernels themselves launch nothing here, as their tensors have no content."""
    backend = FEW._replace(sampler=KernelSampler)
    executor = TorchExecutor(tiny("qwen3", num_hidden_layers=1), kv_blocks=40, block_size=4, backend=backend)
    put_elsewhere(executor)
    launched: list[str] = []
    for module in (activation, attention, norm, rope, sampling):
        monkeypatch.setattr(module, "launch", lambda kernel, *_, **__: launched.append(kernel.fn.__name__))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # which takes a driver
    with Counted() as count:
        executor.launch(plan(**params))
    assert executor._launched[-1].cause is None, executor._launched[-1].cause
    assert isinstance(executor.attention, PagedAttention) and executor.attention._kept
    assert {"_rms_norm", "_rope_write", "_attend", "_gated"} < set(launched)
    assert count.waits == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_models_pass_their_self_test(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"sliding_window": 8} if kind == "mistral" else {}
    loaded = loaded_model(kind, dtype, **fields)
    monkeypatch.setattr(executor_module, "backend_for", lambda device: FEW)
    self_test(loaded)
    assert any(isinstance(m, FusedLayer) for m in loaded.model.modules())


@pytest.mark.parametrize("gated", [False, True])
def test_products_of_few_rows_are_our_kernels_where_there_is_a_tile(
    gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, calls = torch.nn.Linear(64, 64, dtype=torch.bfloat16), []
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()

    def tile(architecture: int, rows: int, inputs: int, outputs: int, silu_gated: bool) -> LinearTile:
        calls.append((rows, inputs, outputs, silu_gated))
        return LinearTile(16, 32, 2, 4, 2)

    multiply = CUDA.operations.silu_mul_linear if gated else CUDA.operations.linear
    with torch.inference_mode():
        expected = multiply(layer, x).float()  # a CPU has no tile: PyTorch's product
        monkeypatch.setattr(backend_module, "linear_tile", tile)
        found = multiply(layer, x).float()
        assert calls == [(5, 64, 32 if gated else 64, gated)]
        assert float((found - expected).norm() / expected.norm()) < 0.02
        seen: list[int] = []
        layer.register_forward_hook(lambda *_: seen.append(1))
        multiply(layer, x)
        assert seen == [1], "whoever hooks into a layer is called"
        calls.clear()
        assert multiply(layer.float(), x.float()).dtype == torch.float32
        multiply(layer.bfloat16(), x.repeat(13, 1))
    assert calls == [], "float32, or more rows than there are tiles for"
