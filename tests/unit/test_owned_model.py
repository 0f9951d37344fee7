"""A model that somebody hands in stays as it was: its modules, parameters, config, mode and outputs."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from runtime.errors import ModelError
from runtime.llm.engine import Engine
from runtime.torch_backend.attention import NAME
from runtime.torch_backend.loading import from_model
from tests.unit.loading_models import tiny

IDS = torch.arange(1, 13)[None]


def facts(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "modules": [(name, id(module), type(module), module.training) for name, module in model.named_modules()],
        "parameters": [
            (name, id(p), p.data_ptr(), p._version, p.requires_grad) for name, p in model.named_parameters()
        ],
        "buffers": [(name, id(b), b.data_ptr(), b._version) for name, b in model.named_buffers()],
        "config": copy.deepcopy(model.config.to_dict()) | {"attention": model.config._attn_implementation},
        "forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "hooks": [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()],
    }


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_model_handed_in_is_not_rewritten(kind: str, training: bool) -> None:
    model = tiny(kind, head_dim=8).train(training)
    before, said = facts(model), logits(model)
    with Engine(from_model(model), kv_tokens=256) as engine:
        assert facts(model) == before
        first = engine.generate([[1, 2, 3]], max_tokens=5)
        assert facts(model) == before
        assert torch.equal(logits(model), said), "while the engine runs"
    assert facts(model) == before
    assert torch.equal(logits(model), said)
    with Engine(from_model(model), kv_tokens=256) as engine:
        assert engine.generate([[1, 2, 3]], max_tokens=5)[0].token_ids == first[0].token_ids


def test_its_attention_is_its_own_in_the_middle_of_a_step() -> None:
    model = tiny().eval()
    loaded, seen = from_model(model), []
    inside, go = threading.Event(), threading.Event()

    def stand_still(module: Any, args: Any) -> None:
        if loaded.model.config._attn_implementation == NAME and threading.current_thread().name.startswith("engine"):
            inside.set()
            assert go.wait(30)

    with Engine(loaded, kv_tokens=256) as engine:
        loaded.model.get_input_embeddings().register_forward_pre_hook(stand_still)
        stream = engine.submit([1, 2, 3], max_tokens=2)
        assert inside.wait(30)
        seen.append(model.config._attn_implementation)
        expected = logits(model)
        go.set()
        stream.result(timeout=30)
    assert seen[0] != NAME
    assert torch.equal(logits(model), expected)


def test_weights_that_are_not_laid_out_anew_are_shared() -> None:
    model = tiny()
    loaded = from_model(model)
    assert loaded.model is not model
    assert [p.data_ptr() for p in loaded.model.parameters()] == [p.data_ptr() for p in model.parameters()]


def test_a_model_that_cannot_be_copied_is_refused_by_name() -> None:
    model = tiny()
    model.lock = threading.Lock()
    with pytest.raises(ModelError, match=r"LlamaForCausalLM: its modules cannot be copied: .*lock"):
        from_model(model)
