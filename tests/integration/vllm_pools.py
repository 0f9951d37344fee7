"""Run by the pytest of an environment with vLLM's scheduler (see test_vllm_agrees.py): KV pools of models whose layers are not
all of one kind, counted as vLLM counts them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from autotune.cli.profile_output import engine_facts
from autotune.engines.vllm.kv import KvPool
from autotune.engines.vllm.model import model_of
from autotune.engines.vllm.named import load_vllm
from autotune.export import export
from autotune.export.vllm import VLLM
from autotune.workload import Arrival
from runtime.knobs import KnobLimits, Knobs
from tests.integration.llama_folder import weightless_folder
from tests.integration.vllm_agrees import BLOCK, Load, Offered, Steered, Stock
from tests.sample_profile import sample_model, sample_profile
from tests.vllm_fakes import CountingExecutor, vllm_engine

WIDTH: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
FULL = FullAttentionSpec(block_size=BLOCK, **WIDTH)
LONG = FullAttentionSpec(block_size=4 * BLOCK, **WIDTH)
MLA = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(block_size=BLOCK, sliding_window=128, **WIDTH)
CHUNKED = ChunkedLocalAttentionSpec(block_size=BLOCK, attention_chunk_size=256, **WIDTH)
STATE: dict[str, Any] = {"shapes": ((4, 4),), "dtypes": (torch.float32,)}
MAMBA = MambaSpec(block_size=4096, **STATE)
ALIGNED = MambaSpec(block_size=2 * BLOCK, mamba_cache_mode="align", **STATE)
POOLS: dict[str, tuple[Any, ...]] = {
    "full": (FULL,), "MLA": (MLA,), "three groups": (FULL, FULL, FULL), "blocks of two sizes": (FULL, LONG),
    "windows": (WINDOW,), "full and windows": (FULL, WINDOW, WINDOW), "full and chunked": (FULL, CHUNKED),
    "full and Mamba": (FULL, MAMBA), "Mamba": (MAMBA,), "full and aligned Mamba": (FULL, ALIGNED),
}  # fmt: skip
LOAD = Load(
    seed=5, knobs=Knobs(64, 0, 256, 64), blocks=70, requests=120, rate=60.0, budget="", admission=False, turns=(),
    ordering="priority", mixed=False, cancels=False, prefix_cache=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return Stock(tmp_path_factory.mktemp("model") / "model")


def served(scheduler: Any, load: Load) -> Steered:
    world = Steered(scheduler, load)
    for when, what in load.events():
        if world.clock.now() < when:
            world.run(when)
        world.offer(what, due=when)
    world.run()
    assert len(world.heard.requests) == load.requests and not scheduler.requests
    assert world.steering.free_blocks() == world.steering.kv.total_blocks
    return world


@pytest.mark.parametrize("name", POOLS)
def test_blocks_and_tokens_are_those_that_vllm_counts(stock: Stock, name: str) -> None:
    specs = POOLS[name]
    scheduler = stock.scheduler(300, False, specs=specs)
    kv, coordinator = KvPool(scheduler), scheduler.kv_cache_manager.coordinator
    none: tuple[list[Any], ...] = tuple([] for _ in specs)
    for tokens in (1, 15, 16, 17, 64, 65, 300, 1000, 4096):
        theirs = coordinator.get_num_blocks_to_allocate(
            "new", tokens, none, 0, 0, 0, tokens, apply_admission_cap=True, prefill_end=tokens
        )
        if name == "full and aligned Mamba":  # vLLM counts the one that is taken first, and two are held
            assert theirs <= kv.blocks(tokens) <= theirs + 1
        else:
            assert kv.blocks(tokens) == theirs, tokens
    capacity, _ = get_kv_cache_capacity(scheduler.vllm_config, scheduler.kv_cache_config)
    assert 0.9 * capacity - kv.block_size <= kv.tokens <= capacity, "vLLM's has the block that stands for no block, too"
    assert not kv.uncounted and kv.tokens % kv.block_size == 0 and kv.total_blocks == kv.free() == 300
    assert kv.grow == len(specs) - specs.count(MAMBA)


@pytest.mark.parametrize(("blocks", "prefix_cache"), [(70, False), (4000, True)])
def test_three_groups_of_one_kind_are_one_with_a_third_of_the_blocks(
    stock: Stock, blocks: int, prefix_cache: bool
) -> None:
    """Step for step, in a pool that is full; prefixes as long as none is evicted, which vLLM does group by group."""
    load = replace(LOAD, prefix_cache=prefix_cache)
    one = served(stock.scheduler(blocks, prefix_cache), load).heard
    three = served(stock.scheduler(3 * blocks, prefix_cache, specs=(FULL, FULL, FULL)), load).heard
    assert [step._replace(kv_free_blocks=0) for step in three.steps] == [
        step._replace(kv_free_blocks=0) for step in one.steps
    ]
    assert [step.kv_free_blocks for step in three.steps] == [3 * step.kv_free_blocks for step in one.steps]
    assert prefix_cache or min(step.kv_free_blocks for step in one.steps) <= 5, "the pool is full"


@pytest.mark.parametrize("name", POOLS)
def test_all_is_served_from_a_pool_that_is_full(stock: Stock, name: str) -> None:
    specs = POOLS[name]
    blocks = KvPool(stock.scheduler(4000, False, specs=specs)).blocks(1080)
    served(stock.scheduler(2 * blocks, False, specs=specs), LOAD)


@pytest.mark.parametrize("budget", [24, 33, 40, 52, 200])
def test_prompts_that_are_cut_at_blocks_go_on_beside_decodes(stock: Stock, budget: int) -> None:
    """Of a model with aligned Mamba states, where less than a block is left of each step."""
    scheduler = stock.scheduler(4000, False, specs=(FULL, ALIGNED))
    scheduler.need_mamba_block_aligned_split, scheduler.cache_config.block_size = True, ALIGNED.block_size
    world = Steered(scheduler, replace(LOAD, knobs=Knobs(64, 0, budget, 256)))
    for number in range(20):
        world.offer(Offered(number, Arrival(0.0, 1, 400, ((number, 1),), "default"), 0, None), due=0.0)
    world.run(0.2)
    assert world.steering.view(world.clock.now()).decoding == 20
    world.offer(Offered(99, Arrival(0.2, 300, 1, ((99, 300),), "default"), 0, None), due=world.clock.now())
    world.run()
    ends = {record.id: record.finished for record in world.heard.requests}
    assert len(ends) == 21 and ends["99"] < min(end for name, end in ends.items() if name != "99")
    assert all(step.tokens <= budget for step in world.heard.steps)
    if budget >= 20 + 2 * ALIGNED.block_size:
        chunks = [step.prefill_tokens for step in world.heard.steps if step.prefill_tokens > 20]
        assert chunks[0] % ALIGNED.block_size == 0, "where blocks fit they are kept to"


def test_windows_let_more_be_admitted_than_full_attention_would(stock: Stock) -> None:
    """What has left a window is free again."""
    most = [
        max(step.running for step in served(stock.scheduler(140, False, specs=specs), LOAD).heard.steps)
        for specs in ((FULL, FULL), (FULL, SlidingWindowSpec(block_size=BLOCK, sliding_window=16, **WIDTH)))
    ]
    assert most[1] >= most[0], most


def test_what_cannot_be_counted_is_off_by_name(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.autotune"), "warning", lambda text, *more: said.append(text % more))
    scheduler = stock.scheduler(300, True, specs=(FULL, FULL))
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[1]
    manager.__class__ = type("FutureManager", (type(manager),), {})
    scheduler.cache_config.kv_cache_size_tokens = 2391
    world = served(scheduler, replace(LOAD, prefix_cache=True))
    kv = world.steering.kv
    assert kv.uncounted == ("Future",) and kv.grow == 0 and kv.blocks(1000) == 0
    assert kv.tokens == 2384, "vLLM's own, in whole blocks"
    assert len(said) == 1 and said[0].startswith("KV growth reserve and the check that whole prompts fit are off")
    assert "of kind Future" in said[0] and scheduler.kv_cache_manager.watermark_blocks == 0


def test_a_pool_beside_the_devices_is_not_counted(stock: Stock) -> None:
    scheduler = stock.scheduler(300, False, specs=(FULL, FULL))
    scheduler.kv_cache_manager.coordinator.single_type_managers[1].block_pool = object()
    assert KvPool(scheduler).uncounted == ("FullAttention",)


class Layered(CountingExecutor):
    """Of a model with more than one kind of layers."""

    specs: tuple[Any, ...] = ()
    memory = 1 << 20

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if method == "get_kv_cache_spec":
            return [{f"layer {n}": spec for n, spec in enumerate(self.specs)}]
        if method == "determine_available_memory":
            return [self.memory]
        return super().collective_rpc(method, *args, **kwargs)


LIMITS = KnobLimits(max_batch_size=16, max_wait_ms=200, token_budget=256, chunk_size=256)


@pytest.mark.parametrize(
    ("specs", "per_token"),
    [
        ((FULL,), 8),
        ((FULL, FULL), 16),
        ((MLA,), 1152),
        ((MLA, MLA, replace(MLA, head_size=128)), 2 * 1152 + 256),  # DeepSeek V3.2's indexer lies in the same group
    ],
)
def test_bytes_of_a_token_are_those_of_the_pool(specs: tuple[Any, ...], per_token: int) -> None:
    made = type("Executor", (Layered,), {"specs": specs, "memory": 1 << 23})
    with vllm_engine(LIMITS, Knobs(8, 0, 64, 48), distributed_executor_backend=made) as engine:
        facts = engine.facts
        assert facts.model is not None and facts.model.kv_bytes_per_token == per_token
        assert facts.kv_tokens == ((1 << 23) // (per_token * BLOCK) - 1) * BLOCK
        assert engine.submit([5] * 20, max_tokens=3, ignore_eos=True).result().token_ids


def test_bytes_of_a_token_in_windows_are_fewer_than_in_full_attention() -> None:
    windows = SlidingWindowSpec(block_size=BLOCK, sliding_window=64, **WIDTH)
    made = type("Executor", (Layered,), {"specs": (FULL, windows)})
    with vllm_engine(LIMITS, Knobs(8, 0, 64, 48), distributed_executor_backend=made) as engine:
        facts = engine.facts
        assert facts.model is not None and 8 < facts.model.kv_bytes_per_token < 12, (
            "2048 tokens of one, and 320 of the other"
        )
        assert facts.growth_reserve == 1 and facts.kv_allocation == "chunk" and facts.kv_tokens % BLOCK == 0
        assert facts.kv_tokens * facts.model.kv_bytes_per_token == pytest.approx(1 << 20, rel=0.2)


def test_a_pool_of_so_many_tokens_has_as_many_in_every_model(tmp_path: Path) -> None:
    """Two groups take two blocks for what one takes one for."""
    made = type(
        "Executor", (Layered,), {"specs": (FULL, SlidingWindowSpec(block_size=BLOCK, sliding_window=4096, **WIDTH))}
    )
    named = load_vllm(
        str(weightless_folder(tmp_path / "model")), dtype="float32", device="cpu", seed=0, max_model_len=1024,
        kv_cache_dtype="auto", arguments={"load_format": "dummy", "enforce_eager": "true", "block_size": str(BLOCK)},
    )  # fmt: skip
    named = replace(named, options={**named.options, "distributed_executor_backend": made}).with_kv_tokens(4096)
    with named.start(Knobs(8, 0, 64, 48), LIMITS) as engine:
        assert abs(engine.facts.kv_tokens - 4096) <= BLOCK


PAGES: dict[str, tuple[Any, ...]] = {
    "one size": (FULL, FULL, *[SlidingWindowSpec(block_size=BLOCK, sliding_window=128, **WIDTH)] * 10),
    "two sizes": (FULL, FULL, *[SlidingWindowSpec(block_size=BLOCK, sliding_window=128, **WIDTH | {"num_kv_heads": 2})] * 10),
    "full and Mamba": (FULL, FULL, *[MambaSpec(block_size=1024, page_size_padded=FULL.page_size_bytes, **STATE)] * 6),
}  # fmt: skip


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("name", PAGES)
def test_the_pool_of_a_profile_is_that_of_what_it_exports(name: str, gpu: bool, tmp_path: Path) -> None:
    """Also where layers take blocks of two sizes, and vLLM schedules by a multiple of both."""
    made = type("Executor", (Layered,), {"specs": PAGES[name], "memory": 1 << 20})
    folder = str(weightless_folder(tmp_path / "model"))
    named = load_vllm(
        folder, dtype="float32", device="cpu", seed=0, max_model_len=1024, kv_cache_dtype="auto",
        arguments={
            "load_format": "dummy", "enforce_eager": "true", "block_size": str(BLOCK),
            "enable_prefix_caching": str("Mamba" not in name).lower(), "kv_cache_memory_bytes": str(1 << 20),
        },
    )  # fmt: skip
    named = replace(named, options={**named.options, "distributed_executor_backend": made})
    with named.start(Knobs(8, 0, 64, 48), LIMITS) as engine:
        measured, facts = _pool(engine._core._llm), engine_facts(engine, named.arguments)
    assert (facts.kv_pool.block_size > BLOCK) == (name != "one size") and facts.block_size_given == BLOCK
    model = sample_model(name=folder, random_weights=False, dtype="float32", max_model_len=1024)
    exported = export(
        sample_profile({"balanced": Knobs(8, 0, 256, 256)}, gpu=gpu, model=model, engine=dict(facts)), VLLM
    )
    names = ("max-model-len", "max-num-seqs", "max-num-batched-tokens", "block-size", "num-gpu-blocks-override")
    args = {key.replace("-", "_"): exported.written[key] for key in names}
    if not gpu:
        assert exported.written["kv-cache-memory-bytes"] == measured[1]
    made.memory = 1 << 18  # type: ignore[attr-defined]
    with vllm_engine(
        LIMITS,
        Knobs(8, 0, 64, 48),
        distributed_executor_backend=made,
        enable_prefix_caching="Mamba" not in name,
        **args,
    ) as engine:
        assert _pool(engine._core._llm) == measured
    again = named.as_profiled(facts.kv_pool.tokens, facts.block_size_given, "Mamba" not in name, None)
    with again.start(Knobs(8, 0, 64, 48), LIMITS) as engine:
        assert _pool(engine._core._llm)[2:] == measured[2:]
        assert engine.facts.kv_tokens == pytest.approx(facts.kv_pool.tokens, rel=0.01)


def _pool(llm: Any) -> tuple[Any, ...]:
    """Blocks, bytes and sizes of the groups' blocks of the pool of ``llm``."""
    config = llm.engine_core.engine_core.scheduler.kv_cache_config
    held = max(tensor.size for tensor in config.kv_cache_tensors)
    return config.num_blocks, held, [group.kv_cache_spec.block_size for group in config.kv_cache_groups]


def test_ceilings_and_defaults_heed_what_vllm_may_run_at_once(tmp_path: Path) -> None:
    """Not only how many it has room for."""
    given = {"max_num_active_seqs": "5", "max_num_scheduled_tokens": "96"}
    named = load_vllm(
        str(weightless_folder(tmp_path / "model")), dtype="float32", device="cpu", seed=0, max_model_len=1024,
        kv_cache_dtype="auto", arguments={"load_format": "dummy", "enforce_eager": "true", "block_size": str(BLOCK), **given},
    )  # fmt: skip
    assert (named.limits.max_batch_size, named.limits.token_budget, named.limits.chunk_size) == (5, 96, 96)
    assert (named.stock.max_batch_size, named.stock.token_budget, named.stock.chunk_size) == (5, 96, 96)
    named = replace(named, options={**named.options, "distributed_executor_backend": CountingExecutor})
    for limits, slots in ((None, 5), (KnobLimits(max_batch_size=3, token_budget=64, chunk_size=64, draft_tokens=0), 3)):
        with named.start(limits=limits) as engine:
            assert engine.limits.max_batch_size == engine.knobs.max_batch_size == slots
            streams = [engine.submit([5] * 20, max_tokens=3, ignore_eos=True) for _ in range(8)]
            assert all(stream.result().token_ids for stream in streams)


def test_mla_keeps_one_vector_for_each_token(tmp_path: Path) -> None:
    about = {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 128, "intermediate_size": 256,
        "moe_intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
        "vocab_size": 258, "kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
        "v_head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(about), encoding="utf-8")
    config = EngineArgs(
        str(tmp_path), skip_tokenizer_init=True, load_format="dummy", dtype="float32", enforce_eager=True
    ).create_engine_config()
    assert config.model_config.use_mla and model_of(config).kv_bytes_per_token == 3 * (64 + 16) * 4
