from __future__ import annotations

import pytest
import torch

from runtime.errors import UnsupportedModelError
from runtime.torch_backend.attention import PackedModel, Terms, packed_attention
from runtime.torch_backend.contract import KVLayer
from runtime.torch_backend.kv_pool import KVPool, default_kv_blocks
from runtime.torch_backend.padded import ChunkInputs, PaddedDecode, attend_chunk, lone_step
from tests.unit.executor_harness import prompts, tiny
from tests.unit.plain_attention import by_definition

HEADS, KV_HEADS, DIM, SCALE = 8, 2, 16, 0.3


def _inputs(tokens: int, context: int, value_dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(tokens * 1000 + context)
    return (
        torch.randn(HEADS, tokens, DIM),
        torch.randn(KV_HEADS, context, DIM),
        torch.randn(KV_HEADS, context, value_dim),
    )


SHAPES = [(1, 1), (1, 40), (16, 16), (64, 64), (65, 65), (130, 130), (70, 200), (3, 300), (97, 301), (257, 257)]
TERMS = {
    "plain": Terms(SCALE, None, None, None),
    "window": Terms(SCALE, 9, None, None),
    "wide window": Terms(SCALE, 100, None, None),
    "softcap": Terms(SCALE, None, 1.5, None),
    "sinks": Terms(SCALE, 9, None, torch.linspace(-2, 2, HEADS)),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())
def test_chunks_attend_by_definition(shape: tuple[int, int], terms: Terms) -> None:
    tokens, context = shape
    query, keys, values = _inputs(tokens, context, DIM // 2 if terms.plain else DIM)
    expected = by_definition(query, keys, values, terms)
    chunk = ChunkInputs(0, tokens, context - tokens, None)
    torch.testing.assert_close(attend_chunk(chunk, query, keys, values, terms).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())
def test_padded_decode_attends_by_definition(terms: Terms) -> None:
    size, lengths = 4, [1, 4, 9, 30]
    pool = KVPool(16, size)
    torch.manual_seed(0)
    kept = KVLayer((KV_HEADS, DIM), (KV_HEADS, DIM), torch.float32)
    layer = pool.layer(torch.nn.Identity(), kept, torch.device("cpu"))
    blocks = torch.randperm(16).tolist()
    tables, expected = [], []
    query = torch.randn(len(lengths), HEADS, DIM)
    for row, length in enumerate(lengths):
        mine = [blocks.pop() for _ in range(-(-length // size))]
        tables.append((mine + [pool.pad_block] * 8)[:8])
        slots = torch.tensor([mine[p // size] * size + p % size for p in range(length)])
        layer.keys[slots], layer.values[slots] = torch.randn(length, KV_HEADS, DIM), torch.randn(length, KV_HEADS, DIM)
        keys, values = layer.keys[slots].transpose(0, 1), layer.values[slots].transpose(0, 1)
        expected.append(by_definition(query[row : row + 1].transpose(0, 1), keys, values, terms)[:, 0])
    decode = PaddedDecode(torch.tensor(tables), torch.tensor(lengths), size)
    found = decode.attend(layer, query, terms)
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_the_hook_counts_its_calls_and_leaves_the_model_as_it_was() -> None:
    loaded = tiny()
    before = loaded.model.config._attn_implementation
    ids = torch.tensor(prompts([12]))
    step = lone_step(12, torch.device("cpu"))
    with torch.inference_mode():
        expected = loaded.model(ids).logits
        with PackedModel(loaded.model).running(step):
            found = loaded.model(ids, position_ids=torch.arange(12)[None], use_cache=False).logits
        again = loaded.model(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert step.calls == loaded.model.config.num_hidden_layers
    assert loaded.model.config._attn_implementation == before
    assert torch.equal(again, expected)


def test_what_the_hook_cannot_compute_is_refused() -> None:
    loaded, module = tiny(), torch.nn.Identity()
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="outside a step"):
        packed_attention(module, x, x, x)
    for changes, words in [
        ({"position_bias": x}, "position bias"),
        ({"is_causal": False}, "not causal"),
        ({"query": x[:, :, :2]}, "number of tokens"),
    ]:
        with (
            PackedModel(loaded.model).running(lone_step(3, x.device)),
            pytest.raises(UnsupportedModelError, match=words),
        ):
            packed_attention(module, **{"query": x, "key": x, "value": x, **changes})
    with PackedModel(loaded.model).running(lone_step(3, x.device)):
        packed_attention(module, x, x, x)
        with pytest.raises(UnsupportedModelError, match="twice"):
            packed_attention(module, x, x, x)


def test_pool_sizes() -> None:
    loaded = tiny()
    blocks = default_kv_blocks(loaded, 16)
    assert 1 <= blocks <= 4096 * 32
    loaded.kv_bytes_per_token = 1 << 50
    with pytest.raises(ValueError, match="one block of 16 tokens takes"):
        default_kv_blocks(loaded, 16)
    with pytest.raises(ValueError, match="kv_blocks is 0"):
        KVPool(0, 16)


def test_scrubbing_zeroes_whole_blocks_only() -> None:
    pool = KVPool(4, 2)
    layer = pool.layer(torch.nn.Identity(), KVLayer((1, 3), (1, 3), torch.float32), torch.device("cpu"))
    layer.keys.fill_(float("nan"))
    layer.values.fill_(1.0)
    pool.scrub([1, 3])
    assert layer.keys[:, 0, 0].isnan().tolist() == [True, True, False, False, True, True, False, False, True, True]
    assert layer.values.sum() == 3 * 6
    assert pool.bytes == 2 * 10 * 3 * 4
