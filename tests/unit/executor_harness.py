"""Tiny random models and an engine core around the torch executor, for its tests."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from runtime.knobs import Knobs
from runtime.llm.core import EngineCore
from runtime.llm.drafts import Drafter
from runtime.llm.output import OutputProcessor
from runtime.llm.scheduler import Scheduler
from runtime.records import StepRecord
from runtime.request import Request, SamplingParams
from runtime.request import Sequence as RunningSequence
from runtime.torch_backend.contract import KVLayer
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.transfer import Readback

VOCAB = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 4},
    {"temperature": 1.2, "top_p": 0.9},
    {},
    {"temperature": 0.8, "top_k": 9, "logprobs": 2},
    {"temperature": 1.0, "min_p": 0.05},
    {"logprobs": 3},
]
"""Parameters of requests that the device samples for."""


def changing(seed: int, *drafts: int) -> Iterator[Knobs]:
    """Other knobs at every step; of ``drafts`` one, where there are any."""
    rng = random.Random(seed)
    while True:
        yield Knobs(
            max_batch_size=rng.choice([1, 3, 8]),
            token_budget=rng.choice([4, 17, 64]),
            chunk_size=rng.choice([1, 5, 32]),
            draft_tokens=rng.choice(drafts) if drafts else 0,
        )


@dataclass
class TinyModel:
    """What the executor needs to know of a model."""

    model: PreTrainedModel
    name: str = "test"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    vocab_size: int = VOCAB
    max_model_len: int = 512
    kv_bytes_per_token: int = 2 * 2 * 2 * 32 * 4
    kv_layers: tuple[KVLayer, ...] = ()
    kv_cache_dtype: str = "auto"


def tiny(model_type: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any) -> TinyModel:
    """A random model whose weights are scaled up, so that the likeliest token stands out and depends on the context."""
    config = AutoConfig.for_model(model_type, **{**SHAPE, **changes})
    torch.manual_seed(0)
    # PyTorch's own attention knows no softcap, and some versions of transformers give it layers that have one
    own = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    model = AutoModelForCausalLM.from_config(config, attn_implementation=own).to(dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "norm" not in name:
                p.mul_(6.0)
    model.generation_config.eos_token_id = None
    return TinyModel(model, dtype=dtype)


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def reference(loaded: TinyModel, prompt: list[int], count: int) -> list[int]:
    """What the model's own ``generate`` puts out, greedily."""
    with torch.inference_mode():
        out = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


def before_forward(loaded: TinyModel, check: Callable[[torch.Tensor], None]) -> None:
    """Have ``check`` look at the token ids of every forward, before it is made."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        check(kwargs["input_ids"])

    loaded.model.register_forward_pre_hook(hook, with_kwargs=True)


def reads_that_fail(monkeypatch: pytest.MonkeyPatch) -> list[Readback]:
    """All reads of results from now on; the first, the fourth and the ninth raise, as errors of a GPU do, whose work runs behind
    the host's back."""
    wait, calls = Readback.wait, list[Readback]()

    def late(self: Readback) -> list[torch.Tensor]:
        calls.append(self)
        if len(calls) in (1, 4, 9):
            raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")
        return wait(self)

    monkeypatch.setattr(Readback, "wait", late)
    return calls


class Oracle:
    """Knows what requests will say, and is wrong now and then: ``answers`` by the request's id."""

    def __init__(self, answers: dict[str, list[int]], wrong: float = 0.3) -> None:
        self.answers, self.wrong, self.dice = answers, wrong, random.Random(4)

    def begin_step(self) -> None:
        pass

    def draft(self, sequence: RunningSequence, most: int) -> list[int]:
        at = len(sequence.output)
        coming = self.answers[sequence.request.id][at : at + self.dice.randint(0, most)]
        return [self.dice.randrange(3, VOCAB) if self.dice.random() < self.wrong else token for token in coming]

    def forget(self, sequence: RunningSequence) -> None:
        pass


def run(
    executor: TorchExecutor,
    requests: Sequence[tuple[list[int], int]],
    knobs: Iterator[Knobs] | Knobs | None = None,
    *,
    kv_blocks: int | None = None,
    drafter: Drafter | None = None,
    heard: list[StepRecord] | None = None,
) -> tuple[list[list[int]], dict[str, BaseException], int]:
    """Drive ``requests`` (prompt, output tokens) to their end. Returns outputs, failures by id, and preemptions; ``heard`` takes
    the steps."""
    scheduler = Scheduler(
        kv_blocks=kv_blocks or executor.pool.block_count, block_size=executor.pool.block_size, drafter=drafter
    )
    core = EngineCore(scheduler, executor, output=OutputProcessor())
    sequences = []
    for i, (prompt, count) in enumerate(requests):
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        sequences.append(core.add(Request(str(i), tuple(prompt), params, count, arrival=float(i))))
    failures: dict[str, BaseException] = {}
    preemptions, now = 0, 1000.0
    while core.has_work:
        if knobs is not None:
            core.settings.set_knobs(knobs if isinstance(knobs, Knobs) else next(knobs))
        outcome = core.step(now)
        now += 1.0
        if outcome.record is not None:
            preemptions += outcome.record.preemptions
            if heard is not None:
                heard.append(outcome.record)
        if outcome.result is not None:
            failures |= {s.request.id: error for s, error in outcome.result.failed}
        with contextlib.suppress(AttributeError):
            scheduler.check_integrity()
    return [s.output for s in sequences], failures, preemptions


def neighbour_of_a_row_for_nothing(made: Callable[[TinyModel], TorchExecutor], late: bool) -> None:
    """Check that NaN which nobody is told of spoils nobody.

    A request stops at a token that makes its next row NaN, and where steps overlap, that row is in flight when the stop is found.
    Another takes its blocks, all three that there are, and fills only a little of the last: in the step that is launched before
    that row is read, or, ``late``, in one launched later.
    """
    loaded = tiny()
    (first, second), (count, more) = prompts([13, 17], seed=2), (10, 4)
    ends, expected = reference(loaded, first, count), reference(loaded, second, more)
    used = {*first, *second, *expected}
    stop = next(at for at in range(5, count) if ends[at] not in used and ends[at] not in ends[:at])
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[ends[stop]] = float("nan")
    scheduler, output = Scheduler(kv_blocks=3, block_size=8), OutputProcessor((ends[stop],))
    core = EngineCore(scheduler, made(loaded), knobs=Knobs(2, 0, 48, 24), output=output)
    core.add(Request("first", tuple(first), SamplingParams(max_tokens=count), count, 0.0))
    failed: list[str] = []

    def serve() -> None:
        while core.has_work:
            result = core.step(1.0).result
            failed.extend(str(error) for _, error in (result.failed if result is not None else ()))

    if late:
        serve()
    params = SamplingParams(max_tokens=more, ignore_eos=True)
    neighbour = core.add(Request("second", tuple(second), params, more, 0.0))
    serve()
    assert not failed, failed
    assert neighbour.output == expected, neighbour.output
