from __future__ import annotations

import pytest
import torch

from runtime.torch_backend.executor import TorchExecutor
from tests.unit.executor_harness import changing, prompts, reference, run, tiny

FLAVOURS = [
    ("qwen3", {}),
    ("llama", {"num_key_value_heads": 4}),
    ("mistral", {"sliding_window": 9}),
    ("gemma2", {"sliding_window": 9, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    ("gpt_oss", {"sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2}),
]


@pytest.mark.parametrize(("model_type", "changes"), FLAVOURS, ids=[name for name, _ in FLAVOURS])
def test_greedy_tokens_are_those_of_generate(model_type: str, changes: dict[str, object]) -> None:
    loaded = tiny(model_type, **changes)
    given = prompts([1, 5, 40, 17, 33, 2, 61, 16])
    counts = [9, 30, 4, 18, 12, 25, 3, 1]
    expected = [reference(loaded, p, n) for p, n in zip(given, counts, strict=True)]
    assert len({tuple(tokens[:3]) for tokens in expected}) > 3  # else equality would say little
    executor = TorchExecutor(loaded, kv_blocks=12, block_size=8)
    outputs, failures, preemptions = run(executor, list(zip(given, counts, strict=True)), changing(1))
    assert not failures
    assert preemptions > 0
    assert outputs == expected
    assert executor.hook_calls == loaded.model.config.num_hidden_layers


def test_bfloat16_runs() -> None:
    loaded = tiny(dtype=torch.bfloat16)
    executor = TorchExecutor(loaded, kv_blocks=64, block_size=16)
    outputs, failures, _ = run(executor, [(p, 6) for p in prompts([4, 30])])
    assert not failures
    assert [len(o) for o in outputs] == [6, 6]
