"""Every supported architecture, token for token against ``model.generate``, while everything around it moves.

The engine's own scheduler and core run real (small) models with random chunk sizes, budgets, batch sizes and wait
windows that change from step to step, in a KV pool so small that sequences are preempted, with shared prefixes.
"""

from __future__ import annotations

import random
import re
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers import __version__ as transformers_version

from runtime.clock import VirtualClock
from runtime.errors import UnsupportedModelError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.core import EngineCore
from runtime.llm.output import OutputProcessor
from runtime.llm.prefix import block_hashes, token_hasher
from runtime.llm.scheduler import Scheduler
from runtime.records import FinishReason
from runtime.request import Request, SamplingParams
from runtime.torch_backend import executor, loading
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.fused_layer import FusedLayer
from runtime.torch_backend.loading import LoadedModel, from_model
from runtime.torch_backend.norm import FusedRMSNorm
from runtime.torch_backend.self_test import self_test
from tests.integration.architectures import ARCHITECTURES, REFUSED, VOCABULARY, build
from tests.tiers import SLOW
from tests.unit.executor_harness import Oracle

BLOCK = 4
POOL_BLOCKS = 18  # the longest request needs 14 of them
SHARED = 16  # tokens that several prompts begin with
LENGTHS = (3, 38, 21, 26, 9, 31, 38)  # of prompts; those longer than SHARED begin alike
OUTPUTS = (24, 10, 14, 18, 26, 18, 12)
MARGIN = 1e-3  # least gap of the two likeliest tokens, in standard deviations of the logits; float noise is 1e-6
SEEDS = (1, 2, 3)
DRAFTED = 4  # the seed of a run in which tokens are drafted
EACH_KIND = (
    "llama", "mistral", "ministral", "gemma2", "gemma4_text", "gpt2", "gpt_neox", "gpt_oss", "phi", "phimoe", "olmo2", "cohere2",
    "opt", "qwen3", "qwen3_moe", "deepseek_v3", "granitemoe", "minicpm3",
)  # fmt: skip
"""One of each kind of attention, position, norm and experts. These run under three seeds, all the others under one: how requests
come between one another is the scheduler's, and the kinds show it."""
HERE = ("llama", "gemma2", "gpt_oss", "deepseek_v3")
"""Those that run in the default tier, under one seed: windows and softcaps, sinks, experts, latent KV."""
DRAFTED_HERE = ("llama", "gemma2", "deepseek_v3")
"""Those that are run with drafts in the default tier, too."""


class Way(NamedTuple):
    """How the engine runs: with what on, and what off."""

    drafts: bool = False  # tokens are drafted now and then, and two in three of them are right
    overlaps: bool = False  # the next step is launched before the last one is collected
    fused: bool = True  # norms and layers, where they can be
    prefixes: bool = True  # what prompts share is computed once


USUAL = Way()
WAYS = {
    "overlap": Way(overlaps=True),
    "overlap-drafts": Way(overlaps=True, drafts=True),
    "unfused": Way(fused=False),
    "no-prefix": Way(prefixes=False),
}
"""What runs beside the usual way, and drafts, in the slow tier."""


class Expected(NamedTuple):
    """Prompts, what ``generate`` makes of them, and which must have ended before (a conversation's next turn), or −1."""

    prompts: list[list[int]]
    outputs: list[list[int]]
    after: list[int]


class Served(NamedTuple):
    outputs: list[list[int]]
    preemptions: int
    cached_tokens: list[int]
    knob_changes: int
    most_rows: int
    accepted: int  # drafted tokens
    in_flight: int  # steps that were, when another was launched
    fused: int  # layers and norms


def generate(model: PreTrainedModel, prompt: list[int], tokens: int) -> tuple[list[int], float]:
    """Greedy continuation by transformers, and the smallest gap between the two likeliest tokens on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some architectures warn of their own caches
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logits = torch.cat(out.logits)
    top = logits.topk(2).values
    margin = ((top[:, 0] - top[:, 1]) / logits.std(-1)).min()
    return out.sequences[0, len(prompt) :].tolist(), float(margin)


def clear_cut(
    model: PreTrainedModel, rng: random.Random, head: list[int], length: int, tokens: int
) -> tuple[list[int], list[int]]:
    """A random prompt that begins with ``head``, and its continuation: one no rounding could change, and not one word."""
    for _ in range(60):
        prompt = head + [rng.randrange(VOCABULARY) for _ in range(length - len(head))]
        output, margin = generate(model, prompt, tokens)
        if margin > MARGIN and len(set(output)) > min(3, tokens / 3):
            return prompt, output
    raise AssertionError("no prompt with a clear continuation: the weights are too flat, or the model repeats itself")


@lru_cache(maxsize=1)
def prepared(architecture: str) -> tuple[LoadedModel, Expected]:
    """The model, self-tested, and what it must say. Kept for the seeds of one architecture."""
    model = build(architecture)
    rng = random.Random(7)
    head = [rng.randrange(VOCABULARY) for _ in range(SHARED)]
    prompts, outputs, after = [], [], []
    for length, tokens in zip(LENGTHS, OUTPUTS, strict=True):
        prompt, output = clear_cut(model, rng, head if length > SHARED else [], length, tokens)
        prompts.append(prompt)
        outputs.append(output)
        after.append(-1)
    turn = prompts[2] + outputs[2]  # the next turn of a conversation finds prompt and answer in the cache
    prompt, output = clear_cut(model, rng, turn, len(turn) + 5, 8)
    expected = Expected([*prompts, prompt], [*outputs, output], [*after, 2])
    check_telling(model, expected)
    loaded = from_model(model)
    self_test(loaded)
    return loaded, expected


def check_telling(model: PreTrainedModel, expected: Expected) -> None:
    """The outputs must vary, and depend on the far end of the context, or equality would prove little."""
    together = [token for output in expected.outputs for token in output]
    assert len(set(together)) > len(together) / 6
    prompt, output = expected.prompts[4], expected.outputs[4]  # shorter than two windows
    changed = [[(prompt[0] + shift) % VOCABULARY, *prompt[1:]] for shift in (1, 25, 50, 75, 100, 125)]
    assert any(generate(model, other, len(output))[0] != output for other in changed), "the first token does not matter"


def random_knobs(rng: random.Random) -> Knobs:
    return Knobs(
        max_batch_size=rng.choice((1, 3, 8, 8)),
        max_wait_ms=rng.choice((0, 0, 4)),
        token_budget=rng.choice((2, 7, 16, 33, 64)),
        chunk_size=rng.choice((1, 3, 8, 17, 64)),
    )


def serve(loaded: LoadedModel, expected: Expected, seed: int, pool: int = POOL_BLOCKS, way: Way = USUAL) -> Served:
    """Run all requests through scheduler, core and executor; knobs change before about every other step."""
    rng = random.Random(seed)
    drafter = Oracle({str(at): tokens for at, tokens in enumerate(expected.outputs)}) if way.drafts else None
    hasher = token_hasher(BLOCK) if way.prefixes else None
    clock = VirtualClock()
    limits = KnobLimits(max_batch_size=8, token_budget=64, chunk_size=64)
    scheduler = Scheduler(kv_blocks=pool, block_size=BLOCK, hasher=hasher, drafter=drafter)
    executor = TorchExecutor(loaded, kv_blocks=pool, block_size=BLOCK, clock=clock, overlaps=way.overlaps)
    core = EngineCore(scheduler, executor, knobs=random_knobs(rng), limits=limits, output=OutputProcessor())
    outputs: list[list[int]] = [[] for _ in expected.prompts]
    waiting = list(range(len(expected.prompts)))
    done: set[int] = set()
    cached = [0] * len(outputs)
    most_rows = changes = accepted = in_flight = 0
    for _ in range(2000):
        ready = [at for at in waiting if expected.after[at] < 0 or expected.after[at] in done]
        if ready and (rng.random() < 0.9 or not core.has_work):
            at = ready[0]
            waiting.remove(at)
            prompt = expected.prompts[at]
            request = Request(
                str(at),
                tuple(prompt),
                SamplingParams(),
                len(expected.outputs[at]),
                clock.now(),
                block_hashes=block_hashes(prompt, BLOCK) if way.prefixes else (),
            )
            core.add(request)
        elif not waiting and not core.has_work:
            break
        if rng.random() < 0.5:
            before = core.settings.epoch
            knobs = random_knobs(rng)
            if way.drafts:
                knobs = knobs.with_(draft_tokens=rng.choice((0, 1, 3, 7)))
            changes += core.settings.set_knobs(knobs) > before
        outcome = core.step(clock.now())
        scheduler.check_integrity()
        in_flight += bool(executor._launched)
        clock.advance(0.001)
        if outcome.record is not None:
            assert outcome.record.failed == 0, outcome.result
            most_rows = max(most_rows, outcome.record.decodes + outcome.record.chunks)
            accepted += outcome.record.accepted
        for sequence, record in outcome.finished:
            assert record.reason is FinishReason.LENGTH, record.cause
            at = int(sequence.request.id)
            outputs[at] = list(sequence.output)
            cached[at] = record.cached_tokens
            done.add(at)
    assert len(done) == len(expected.prompts), "the engine did not get through its requests"
    assert scheduler.kv.free == pool
    fused = sum(isinstance(module, FusedLayer | FusedRMSNorm) for module in loaded.model.modules())
    return Served(outputs, scheduler.preemptions, cached, changes, most_rows, accepted, in_flight, fused)


def known_here(architecture: str) -> None:
    if architecture not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers_version} has no {architecture}")


def cases(name: str) -> list[Any]:
    """Seed and way of the runs of ``name``."""
    here = [1] * (name in HERE) + [DRAFTED] * (name in DRAFTED_HERE)
    seeds = (*(SEEDS if name in EACH_KIND else SEEDS[:1]), DRAFTED)
    usual = [(str(seed), seed, Way(drafts=seed == DRAFTED)) for seed in seeds]
    others = [(called, DRAFTED if way.drafts else SEEDS[0], way) for called, way in WAYS.items()]
    return [
        pytest.param(name, seed, way, id=f"{name}-{called}", marks=() if called in map(str, here) else SLOW)
        for called, seed, way in usual + others
    ]


@pytest.mark.parametrize(
    ("architecture", "seed", "way"),
    [case for name in ARCHITECTURES for case in cases(name)],  # one after the other: one model is kept
)
def test_same_tokens_as_generate(architecture: str, seed: int, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    known_here(architecture)
    loaded, expected = prepared(architecture)
    if not way.fused:
        for name in ("fuse_norms", "fuse_layers"):
            monkeypatch.setattr(executor, name, lambda *given: 0)
        loaded = from_model(build(architecture))
    served = serve(loaded, expected, seed, way=way)
    assert served.outputs == expected.outputs
    assert served.preemptions >= 2
    assert (sum(served.cached_tokens) >= SHARED) if way.prefixes else not any(served.cached_tokens)
    assert served.knob_changes > 5
    assert served.most_rows > 2
    assert (served.accepted > 10) if way.drafts else not served.accepted
    assert (served.in_flight > 4) if way.overlaps else not served.in_flight  # never while drafts are verified
    assert way.fused or not served.fused


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_the_next_turn_finds_prompt_and_answer_in_the_cache(architecture: str) -> None:
    """With room to keep them: all of the earlier turn but its last token, which was never fed, in full blocks."""
    loaded, expected = prepared(architecture)
    served = serve(loaded, expected, 1, pool=200)
    assert served.outputs == expected.outputs
    assert served.preemptions == 0
    known = len(expected.prompts[2]) + len(expected.outputs[2]) - 1
    assert served.cached_tokens[-1] == known // BLOCK * BLOCK > len(expected.prompts[2])


def test_at_least_35_architectures_run_here() -> None:
    assert sum(architecture in CONFIG_MAPPING for architecture in ARCHITECTURES) >= 35


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_would_be_wrong_is_refused(architecture: str) -> None:
    known_here(architecture)
    with pytest.raises(UnsupportedModelError) as raised:
        self_test(from_model(build(architecture)))
    message = str(raised.value)
    assert message.startswith(f"model {architecture}: ")
    assert REFUSED[architecture][1] in message
    assert "\n" not in message


@pytest.mark.parametrize("architecture", ["llama4_text", "minimax", "qwen3_next", "lfm2"])
def test_self_test_refuses_what_the_config_would_have_told(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer types are not all there is between these and wrong tokens."""
    monkeypatch.setattr(loading, "check_config", lambda config, name: None)
    with pytest.raises(UnsupportedModelError, match=f"model {architecture}: "):
        self_test(from_model(build(architecture)))


def test_documented_list_is_the_tested_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    tested, refused = text.split("## Tested", 1)[1].split("Also refused", 1)[0].split("## Refused", 1)
    assert sorted(re.findall(r"`([^`]+)`", tested.split("<!-- list -->")[1])) == sorted(ARCHITECTURES)
    assert set(re.findall(r"^\| `([^`]+)` \|", refused, re.MULTILINE)) == set(REFUSED)
