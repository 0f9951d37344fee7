"""Encoders without padding give what they give alone, and those that would not are refused."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
)

from runtime.batching.invoke import Function, run_call
from runtime.errors import UnsupportedModelError
from runtime.torch_backend.encoder import PackedEncoder

SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def bert() -> BertModel:
    torch.manual_seed(1)
    return BertModel(BertConfig(**SIZES, max_position_embeddings=64), add_pooling_layer=False).eval()


def roberta() -> RobertaModel:
    torch.manual_seed(2)
    config = RobertaConfig(**SIZES, max_position_embeddings=64, pad_token_id=1)
    return RobertaModel(config, add_pooling_layer=False).eval()


def lists(count: int, seed: int, longest: int = 30) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 60) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def alone(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).last_hidden_state[0]


@pytest.mark.parametrize("make", [bert, roberta])
@pytest.mark.parametrize("ordered", [True, False])
def test_each_list_gets_what_it_gets_alone(make: type, ordered: bool) -> None:
    """RoBERTa counts positions from its padding's id on, which is found out."""
    batch = sorted(lists(17, seed=3), key=len) if ordered else lists(17, seed=3)
    plain = make()
    wanted = [alone(plain, ids) for ids in batch]
    encoder = PackedEncoder(make())
    found = encoder.encode(batch).split([len(ids) for ids in batch])
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
    means = encoder.mean(batch)
    for mine, theirs in zip(means, wanted, strict=True):
        mean = theirs.mean(0)
        torch.testing.assert_close(mine, mean / mean.norm(), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(encoder.mean(batch, normalize=False)[3], wanted[3].mean(0), atol=2e-5, rtol=1e-4)


def test_several_threads_do_not_mix() -> None:
    encoder = PackedEncoder(bert())
    batches = [lists(6, seed) for seed in range(8)]
    wanted = [encoder.mean(batch) for batch in batches]
    with ThreadPoolExecutor(max_workers=4) as threads:
        for mine, theirs in zip(threads.map(encoder.mean, batches), wanted, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_no_list_and_an_empty_list_are_told() -> None:
    encoder = PackedEncoder(bert(), pack=False)
    for wrong in ([], [[3, 4], []]):
        with pytest.raises(ValueError, match="1 token or more"):
            encoder.encode(wrong)


@pytest.mark.parametrize(
    ("make", "wrong", "says"),
    [
        (bert, [5] * 65, "lists hold one of 65 tokens; BertModel has positions for 64, so no list may be longer"),
        (roberta, [5] * 63, "lists hold one of 63 tokens; RobertaModel has positions for 62, so no list may be longer"),
        (bert, [5, 60], "lists hold token id 60; BertModel has a vocabulary of 60, so ids are between 0 and 59"),
        (bert, [-1], "lists hold token id -1; BertModel has a vocabulary of 60, so ids are between 0 and 59"),
    ],
)
def test_what_no_table_has_a_row_for_is_told_before_anything_is_computed(
    make: Callable[[], PreTrainedModel], wrong: list[int], says: str
) -> None:
    """On a GPU such a look-up is an assertion that ends every later call, too."""
    model = make()
    encoder = PackedEncoder(model, pack=False)
    computed: list[object] = []
    model.register_forward_pre_hook(lambda *given: computed.append(given))
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        encoder.mean([[5, 6], wrong])
    assert not computed
    assert len(encoder.encode([[5] * (64 if make is bert else 62), [0, 59]])) > 60


def test_an_item_that_the_model_does_not_take_fails_alone() -> None:
    encoder = PackedEncoder(bert(), pack=False)
    items = [[5, 6], [7], [5] * 65, [8, 9, 10], [60]]
    ran = run_call(Function(lambda lists: list(encoder.mean(lists))), items, lambda at, outputs: True, isolate=True)
    assert [isinstance(found, ValueError) for found in ran.outcomes] == [False, False, True, False, True]
    torch.testing.assert_close(ran.outcomes[3], encoder.mean([items[3]])[0])


def test_positions_that_are_computed_have_no_end() -> None:
    torch.manual_seed(6)
    sizes = {**SIZES, "num_hidden_layers": 1, "layer_types": ["full_attention"], "pad_token_id": 0}
    config = ModernBertConfig(**sizes, max_position_embeddings=16)
    encoder = PackedEncoder(ModernBertModel(config).eval(), pack=False)
    assert len(encoder.encode([[5] * 40])) == 40


def test_a_model_that_needs_padding_is_refused() -> None:
    """MPNet adds a position bias to its scores, which a packed batch would get wrong."""
    torch.manual_seed(4)
    model = MPNetModel(MPNetConfig(**SIZES, max_position_embeddings=64), add_pooling_layer=False)
    with pytest.raises((UnsupportedModelError, ValueError)):
        PackedEncoder(model)


def test_a_model_whose_positions_begin_nowhere_that_it_says_is_refused() -> None:
    model = roberta()
    model.config.pad_token_id = 59
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        before = model(ids).last_hidden_state
    with pytest.raises(UnsupportedModelError, match="RobertaModel gives other results without padding"):
        PackedEncoder(model)
    with torch.no_grad():
        assert torch.equal(model(ids).last_hidden_state, before), "it is as it was"


def test_attention_that_never_comes_is_noticed() -> None:
    """A model whose layers do not ask for the attention they are given would look into its neighbours."""
    torch.manual_seed(5)
    model = DistilBertModel(
        DistilBertConfig(vocab_size=60, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64)
    )
    wanted = alone(model.eval(), [5, 6, 7])
    found = PackedEncoder(model).encode([[9, 8], [5, 6, 7]])[2:]
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
