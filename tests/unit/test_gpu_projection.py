"""What a step of a GPU is projected to take: calls counted from the executor, bytes and operations by hand, published figures."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

pytest.importorskip("triton", minversion="3.6", reason="the GPU kernels need Triton 3.6 or newer")

from benchmarks.gpu_projection import calls
from benchmarks.gpu_projection.__main__ import main, projected
from benchmarks.gpu_projection.calls import BLOCK, GPU, Call, Decoder, Shape
from benchmarks.gpu_projection.chips import AMPERE, CHIPS, GRAPH_GAP_S, HOPPER, Slack, fastest_s, fitted, slowest_s
from benchmarks.gpu_projection.host import host_us
from benchmarks.gpu_projection.steps import Step
from benchmarks.gpu_projection.work import Work, of_kernel, of_operation, touched
from runtime.torch_backend.cuda.backend import CUDA
from runtime.torch_backend.presets import PRESETS
from runtime.torch_backend.resident import ResidentDecode
from tests.unit.command_line import exit_code

NANO = PRESETS["nano"].fields
LAYERS, HIDDEN, INNER, VOCAB = (
    NANO[n] for n in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
)
HEADS, KV_HEADS, DIM = (NANO[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
MATRICES = LAYERS * HIDDEN * ((2 * HEADS + 2 * KV_HEADS) * DIM + 3 * INNER) + HIDDEN * VOCAB


@pytest.fixture(scope="module")
def nano() -> Decoder:
    return Decoder("nano")


def test_a_layer_is_ten_launches_of_kernels_that_are_known(nano: Decoder) -> None:
    calls = nano.calls(Step.decodes(100, 50), 132)
    names = Counter(call.name for call in calls)
    layer = {"mm": 4, "_rms_norm": 2, "_rope_write": 1, "_attend": 1, "_merge": 1, "_gated": 1}
    assert {name: names[name] // LAYERS for name in layer} == layer
    assert names["mm"] == 4 * LAYERS + 1 and names["_rms_norm"] == 2 * LAYERS + 1  # the head, and the model's own norm
    assert [call.name for call in calls if not call.known] == []
    assert len(calls) < 10 * LAYERS + 40


@pytest.mark.parametrize("batch", [1, 64])
def test_products_read_every_weight_once_and_compute_with_it(nano: Decoder, batch: int) -> None:
    calls = [call for call in nano.calls(Step.decodes(*[40] * batch), 132) if call.name == "mm"]
    assert sum(call.flops for call in calls) == 2 * batch * MATRICES
    activations = LAYERS * (3 * HIDDEN + (2 * HEADS + 2 * KV_HEADS) * DIM + 3 * INNER + HIDDEN) + HIDDEN + VOCAB
    assert sum(call.bytes for call in calls) == 2 * (MATRICES + batch * activations)


def test_attention_reads_the_context_once(nano: Decoder) -> None:
    def read(*context: int) -> int:
        return sum(call.bytes for call in nano.calls(Step.decodes(*context), 132) if call.name == "_attend")

    token = LAYERS * 2 * KV_HEADS * DIM * 2
    assert token == nano.shape.kv_bytes_per_token
    more = read(*[128] * 4) - read(*[112] * 4)  # neither is long enough to be split; 16 tokens are a block
    assert more == 4 * (16 * token + LAYERS * 8)


def test_the_model_is_of_full_width(nano: Decoder) -> None:
    """Its weights, the embedding left out, are those the preset has."""
    assert nano.shape.weights == 2 * (PRESETS["nano"].parameters - VOCAB * HIDDEN)
    shapes = {call.shapes[1] for call in nano.calls(Step.decodes(9), 132) if call.name == "mm"}
    assert shapes == {
        (HIDDEN, (HEADS + 2 * KV_HEADS) * DIM), (HEADS * DIM, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN), (HIDDEN, VOCAB),
    }  # fmt: skip


def test_a_prompt_is_one_forward_with_one_row_through_the_head(nano: Decoder) -> None:
    products = [call for call in nano.calls(Step((300,), (300,)), 132) if call.name == "mm"]
    assert products[0].shapes[0] == (300, HIDDEN) and products[-1].shapes[0] == (1, HIDDEN)


def test_more_multiprocessors_split_more() -> None:
    """The merge of parts is over as many programs as the chip suggests."""
    query = torch.zeros(2, HEADS, DIM, device=GPU, dtype=torch.bfloat16)
    given = {"out": query, "HEADS": HEADS, "VALUE_DIM": DIM, "TILE": 1}
    step = Step.decodes(8192, 100)
    few, many = (of_kernel("_merge", given, (splits, 1, HEADS), step) for splits in (4, 64))
    assert 0 < few.read < many.read and few.written == many.written == HEADS * DIM * 2


@pytest.mark.parametrize(
    ("name", "shapes", "made", "expected"),
    [
        ("mm", [(3, 4), (4, 5)], (3, 5), Work(2 * (12 + 20), 2 * 15, 2 * 3 * 4 * 5)),
        ("addmm", [(5,), (3, 4), (4, 5)], (3, 5), Work(2 * (5 + 12 + 20), 2 * 15, 2 * 3 * 4 * 5)),
        ("embedding", [(1000, 8), (3,)], (3, 8), Work(2 * (24 + 3), 2 * 24)),
        ("copy_", [(6,), (6,)], (6,), Work(12, 12)),
        ("add", [(6,), (6,)], (6,), Work(24, 12)),
        ("zeros", [], (6,), Work(0, 12)),
    ],
)
def test_work_by_hand(name: str, shapes: list[tuple[int, ...]], made: tuple[int, ...], expected: Work) -> None:
    def there(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=GPU)

    assert of_operation(name, [there(s) for s in shapes], [there(made)]) == expected


def test_what_is_expanded_is_read_once() -> None:
    assert touched(torch.empty(1, 8, device=GPU).expand(100, 8)) == 32


def test_a_kernel_that_nobody_knows_is_said_to_be_so() -> None:
    x = torch.empty(10, device=GPU)
    assert of_kernel("_new", {"x": x, "y": x, "n": 3}, (1,), Step.decodes(5)) == Work(40, 0, 0, False)


@pytest.mark.parametrize(("name", "stated"), [("h100-llama3-8b", HOPPER), ("a100-llama3-8b", AMPERE)])
def test_the_slack_is_that_of_the_measured_tables(name: str, stated: Slack) -> None:
    for found, said, unit in zip(fitted(name), stated, (1, 1e-6, 1, 1, 1e-6, 1e-6), strict=True):
        assert found / unit == pytest.approx(said / unit, abs=0.006 if unit == 1 else 0.06)


def test_a_step_is_the_sum_of_its_calls() -> None:
    chip = next(c for c in CHIPS if c.name == "H100")
    product = Call("mm", "product", 3_350_000_000, 0, (), True)
    small = Call("_gated", "other", 0, 0, (), True)
    attend, merge = (Call(name, "attention", 0, 0, (), True) for name in ("_attend", "_merge"))
    assert fastest_s(chip, [product, small]) == pytest.approx(1e-3 + 2 * GRAPH_GAP_S)
    slack = chip.slack
    assert slowest_s(chip, [product]) == pytest.approx(1e-3 / slack.product + slack.product_s)
    assert slowest_s(chip, [small, attend, merge]) == pytest.approx(slack.small_s + slack.attention_s)
    computing = Call("mm", "product", 0, int(chip.flops), (), True)
    assert slowest_s(chip, [computing]) == pytest.approx(1 / slack.matmul + slack.product_s)


def test_the_floor_of_an_8b_model_on_an_h100() -> None:
    """15.0 GB of weights and 131,072 bytes of each token at 3.35 TB/s."""
    chip = next(c for c in CHIPS if c.name == "H100")
    shape = Shape("x", 15_010_000_000, 8_030_000_000, 131_072, 32, 8)
    assert projected(shape, [], chip, 1, 1024).floor_s == pytest.approx(4.52e-3, rel=0.01)
    assert projected(shape, [], chip, 64, 1024).floor_s == pytest.approx(7.04e-3, rel=0.01)
    assert projected(shape, [], chip, 64, 1024).fits and not projected(shape, [], chip, 256, 8192).fits


@pytest.mark.parametrize(("batch", "context"), [(1, 3 * BLOCK), (3, 40), (3, 2 * BLOCK + 1)])
def test_a_recorded_step_is_one_replay_of_all_that_computes(nano: Decoder, batch: int, context: int) -> None:
    found = nano.replayed(batch, context, 132)
    assert found is not None and found.replays == 1
    eager = Counter(call.name for call in nano.calls(Step.decodes(*[context] * batch), 132))
    inside = Counter(call.name for call in found.inside)
    kernels = ("mm", "_rms_norm", "_rope_write", "_attend", "_merge", "_gated")
    assert {name: inside[name] for name in kernels} == {name: eager[name] for name in kernels}
    assert inside["_sample"] == 1
    assert [call.name for call in found.beside] == ["copy_", "clone", "cat", "_to_copy"]  # the work list; the tokens
    assert [call.name for call in found.entering] == ["_to_copy", "index_copy_", *(c.name for c in found.beside)]


def test_the_calls_of_a_step_are_counted_behind_a_recorded_one_as_before(nano: Decoder) -> None:
    before = nano.calls(Step.decodes(40), 132)
    nano.replayed(1, 40, 132)
    assert nano.calls(Step.decodes(40), 132) == before


def test_without_recordings_no_replay_is_claimed(nano: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CUDA", CUDA._replace(record=None))
    assert nano.replayed(1, 40, 132) is None


@pytest.mark.parametrize("recorded", [True, False])
def test_the_host_is_timed_with_all_sequences_decoding(recorded: bool) -> None:
    assert 1 < host_us(4, context=40, steps=3, recorded=recorded) < 1e6


def test_a_step_that_is_not_replayed_is_not_timed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResidentDecode, "fits", lambda self, plan: False)
    with pytest.raises(AssertionError):
        host_us(4, context=40, steps=3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "gpt"], "--model is gpt; it must be one of llama-3.1-8b, qwen3-8b, qwen3-0.6b"),
        (["--chip", "T4"], "--chip is T4; it must be one of A100, H100, H200, L4"),
        (["--batches", "0"], "0; it must be whole numbers from 1 to 131072"),
    ],
)
def test_bad_input_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, words) == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_ends_with_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert "a layer is 10 launches" in out and "NOT KNOWN" not in out
    for batch in ("b1", "b64"):
        assert 1 < found[f"bound_decode_vs_floor_{batch}"] < found[f"projected_decode_vs_floor_{batch}"] < 2
    assert found["graphs"] and found["launches_per_step"] == 1 and found["calls_beside_replay"] == 4
    assert 320 <= found["calls_per_step"] <= 380 and 320 <= found["calls_in_replay"] <= 380
    assert 10 < found["host_us_per_step"] < 20_000 and 10 < found["host_us_per_step_one_by_one"] < 20_000
