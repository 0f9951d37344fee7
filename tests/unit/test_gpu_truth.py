"""Step times of real GPUs: known figures, what the flags do, and that the engine asks with the chunks it makes."""

from __future__ import annotations

import itertools
import pickle
import random
from typing import Any

import pytest

from benchmarks.gpu_truth import ALL, BASE, COARSE, LADDER, RECORDED, Flags, Truth, load, names, simulated_engine
from benchmarks.gpu_truth.truth import PROMPTS, alike
from runtime.errors import InputError
from runtime.request import SamplingParams
from runtime.step_model import StepFeatures, StepGraphs
from tests.fakes import Records

pytestmark = pytest.mark.unit

BARE = Flags()
KNOWN = {  # ms: one decode behind 1,000 tokens; 64 behind 1,000 each; a prompt of 2,048; 512 tokens behind 4,096 beside those 64
    "a100-llama2-7b": (10.46, 29.69, 142.94, 65.27),
    "a100-llama3-8b": (11.00, 17.94, 153.20, 54.45),
    "h100-llama2-7b": (6.22, 17.30, 44.11, 29.22),
    "h100-llama3-8b": (6.48, 10.46, 42.19, 18.22),
    "h100-mixtral-8x7b-tp2": (6.40, 21.54, 59.07, 30.99),
    "h200-llama3-8b-fp8": (3.76, 5.72, 28.56, 18.61),
    "rtx4090-llama3-8b": (16.80, 29.08, 193.00, 90.15),
    "rtxpro6000-qwen3-32b": (44.81, 62.51, 365.70, 178.65),
}


@pytest.mark.parametrize("name", KNOWN)
def test_steps_take_what_the_published_tables_come_to(name: str) -> None:
    truth = load(name, BARE)
    steps = ((1, 1000, ()), (64, 64_000, ()), (0, 0, [(0, 2048)]), (64, 64_000, [(4096, 512)]))
    assert [1e3 * truth.step_seconds(*step) for step in steps] == pytest.approx(KNOWN[name], abs=0.006)


def test_there_are_eight_and_each_says_where_it_comes_from() -> None:
    assert set(names()) == set(KNOWN)
    for name in names():
        truth = load(name)
        assert truth.kv_tokens > 40_000 and truth.meta["sources"]["revision"]
    with pytest.raises(InputError, match="truth is 'h100'; it must be one of a100-llama2-7b"):
        load("h100")


def test_a_weight_bound_step_takes_what_reading_the_weights_takes() -> None:
    """Llama-3-8B in bfloat16 is 16 GB; an H100 reads 3.35 TB/s at most, and nobody reaches all of it."""
    alone = load("h100-llama3-8b", BARE).step_seconds(1, 100)
    assert 16e9 / 3.35e12 < alone < 1.4 * 16e9 / 3.35e12


@pytest.mark.parametrize("name", KNOWN)
def test_more_context_takes_longer_and_between_measured_points_it_is_between(name: str) -> None:
    truth = load(name, BASE)
    times = [truth.step_seconds(32, 32 * context) for context in range(64, 9000, 64)]
    assert all(b >= 0.98 * a for a, b in itertools.pairwise(times)) and times[-1] > times[0]
    for low, high in ((1000, 1100), (3000, 3300)):
        ends = sorted(truth.step_seconds(32, 32 * context) for context in (low, high))
        assert ends[0] <= truth.step_seconds(32, 32 * (low + high) // 2) <= ends[1]
    behind = [truth.step_seconds(0, 0, [(start, 512)]) for start in (0, 4096, 16_384)]
    assert behind == sorted(behind) and behind[-1] > behind[0]
    whole = truth.step_seconds(0, 0, [(0, 4096)])
    assert truth.step_seconds(0, 0, [(0, 2048)]) < whole < truth.step_seconds(0, 0, [(0, 2048), (0, 4096)])


def test_tokens_beyond_the_tables_cost_as_the_last_that_were_measured() -> None:
    truth = load("h100-llama3-8b", BARE)
    times = [truth.step_seconds(0, 0, [(0, 128)] * count) for count in (60, 120, 240)]
    assert times[2] - times[1] == pytest.approx(2 * (times[1] - times[0]), rel=0.15)


def seconds(name: str, flags: Flags, decodes: int = 50, chunks: Any = (), context: int = 1000) -> float:
    return load(name, flags).step_seconds(decodes, decodes * context, chunks)


def test_the_host_costs_every_step_and_every_sequence() -> None:
    name, chunk = "a100-llama3-8b", [(0, 100)]
    for chunks, sequences in (((), 50), (chunk, 51)):
        bare = seconds(name, BARE, chunks=chunks)
        assert seconds(name, Flags(host_s=1e-3), chunks=chunks) == pytest.approx(bare + 1e-3)
        assert seconds(name, Flags(host_seq_s=1e-5), chunks=chunks) == pytest.approx(bare + sequences * 1e-5)


def test_decodes_are_as_wide_as_the_next_graph_and_not_beyond_the_ladder() -> None:
    name, context = "a100-llama3-8b", 64_000
    padded, bare = load(name, Flags(pad=COARSE)), load(name, BARE)
    assert padded.step_seconds(64, context) == bare.step_seconds(64, context)
    tokens = [(n, padded.step_seconds(n, context) - bare.step_seconds(n, context)) for n in (65, 100, 120)]
    assert all(more > 0 for _, more in tokens), tokens
    assert padded.step_seconds(600, context) == bare.step_seconds(600, context)
    fine, mixed = load(name, Flags(pad=LADDER)), [(0, 100)]
    assert bare.step_seconds(65, context) < fine.step_seconds(65, context) < padded.step_seconds(65, context)
    assert padded.step_seconds(65, context, mixed) == bare.step_seconds(65, context, mixed)
    whole = Flags(pad_prompts=COARSE, mixed_s=4e-3)
    assert load(name, whole).step_seconds(28, 28_000, mixed) == bare.step_seconds(28, 28_000, mixed), (
        "128 tokens, recorded"
    )
    assert load(name, whole).step_seconds(65, context, mixed) > bare.step_seconds(65, context, mixed)
    beyond = load(name, whole).step_seconds(65, context, [(0, 600)])
    assert beyond == pytest.approx(bare.step_seconds(65, context, [(0, 600)]) + 4e-3)
    assert RECORDED.graphs == StepGraphs(LADDER, PROMPTS, 256) and ALL.graphs == StepGraphs(LADDER)


def test_steps_with_prompts_cost_more_by_their_flags_and_others_do_not() -> None:
    name, chunk = "h100-llama3-8b", [(0, 64)]
    bare, alone = seconds(name, BARE, chunks=chunk), seconds(name, BARE)
    assert seconds(name, Flags(mixed_s=4e-3), chunks=chunk) == pytest.approx(bare + 4e-3)
    assert seconds(name, Flags(mixed_floor_s=0.5), chunks=chunk) == 0.5
    reads = seconds(name, BARE, chunks=chunk) - seconds(name, BARE, chunks=chunk, context=500)
    reads_more = seconds(name, Flags(mixed_kv=1.6), chunks=chunk) - seconds(
        name, Flags(mixed_kv=1.6), chunks=chunk, context=500
    )
    assert reads_more == pytest.approx(1.6 * reads)
    assert all(seconds(name, f) == alone for f in (Flags(mixed_s=4e-3), Flags(mixed_floor_s=0.5), Flags(mixed_kv=1.6)))


def test_all_reduces_without_graphs_and_keys_in_a_row_take_longer() -> None:
    chunk = [(0, 16)]
    name = "h100-mixtral-8x7b-tp2"
    assert seconds(name, Flags(eager_comm=True), chunks=chunk) > seconds(name, BARE, chunks=chunk)
    assert seconds(name, Flags(eager_comm=True)) == seconds(name, BARE)
    whole = sum(count for _, count in chunk) + 1
    graphs = Flags(eager_comm=True, pad_prompts=(whole,))
    assert seconds(name, graphs, decodes=1, chunks=chunk) == seconds(name, BARE, decodes=1, chunks=chunk), "recorded"
    behind = [(30_000, 64)]
    assert seconds(name, Flags(kv_split=True), chunks=behind) < seconds(name, BARE, chunks=behind)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"host_s": -1.0}, "host_s is -1.0; it must be a number of seconds"),
        ({"mixed_s": float("nan")}, "mixed_s is nan; it must be"),
        ({"mixed_kv": 0.5}, "mixed_kv is 0.5; it must be a number of at least 1"),
        ({"pad": (8, 4)}, r"pad is \(8, 4\); it must be batch sizes"),
        ({"pad": (0, 4)}, "pad is"),
        ({"pad_prompts": (32, 16)}, r"pad_prompts is \(32, 16\); it must be"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Flags(**flags)


def test_counts_give_back_a_single_chunk_and_take_several_for_alike() -> None:
    assert alike(0, 0, 0) == []
    assert alike(512, 512 + 4096, 1) == [(4096, 512)]
    assert alike(10, 310, 3) == [(100, 4), (100, 3), (100, 3)]
    truth = load("a100-llama2-7b", ALL)
    assert truth.predict(StepFeatures(4, 4000, 512, 4608, 1, 1)) == truth.step_seconds(4, 4000, [(4096, 512)])
    assert truth.predict_run(7, 700, 5) == [truth.predict(StepFeatures(7, 700 + 7 * i, 0, 0, 0)) for i in range(5)]


def test_it_is_copied_to_other_processes() -> None:
    truth = load("rtx4090-llama3-8b", ALL)
    copied: Truth = pickle.loads(pickle.dumps(truth))
    assert copied.step_seconds(9, 9000, [(64, 64)]) == truth.step_seconds(9, 9000, [(64, 64)])


def test_the_engine_s_steps_take_what_the_truth_says_of_their_very_chunks() -> None:
    truth, rng = load("h100-llama3-8b", ALL), random.Random(1)
    engine, log = simulated_engine(truth), Records()
    engine.subscribe(log)
    lengths = [17, 4000, 900]
    for length in lengths:
        engine.submit([rng.randrange(1000) for _ in range(length)], SamplingParams(max_tokens=3))
    engine.run()
    first, second = log.steps[0], log.steps[1]
    assert first.duration == pytest.approx(truth.step_seconds(0, 0, [(0, n) for n in lengths]), rel=1e-9)
    assert first.duration != pytest.approx(truth.predict(StepFeatures.of(first)), rel=1e-3), "alike they are not"
    assert second.duration == pytest.approx(truth.step_seconds(3, sum(lengths) + 3), rel=1e-9)
    assert engine.facts.kv_tokens == truth.kv_tokens // 16 * 16
