"""A model without weights: what stands in for the torch backend where a test is about everything around it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from runtime.llm.plan import StepPlan, StepResult, Token
from runtime.records import RequestRecord, StepRecord
from runtime.request import Sequence

EOS = 256


class ByteTokenizer:
    """A token is a byte; ``EOS`` shows no text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < EOS).decode(errors="replace")


@dataclass
class FakeModel:
    name: str = "fake"
    tokenizer: ByteTokenizer | None = field(default_factory=ByteTokenizer)
    vocab_size: int = EOS + 1
    max_model_len: int = 256
    eos_token_ids: tuple[int, ...] = (EOS,)
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    tokenizer_error: str = ""


def count_up(sequence: Sequence) -> int:
    """The next token is the last one plus 1, so that an output can be known beforehand."""
    return ((sequence.output or sequence.request.prompt)[-1] + 1) % EOS


class FakeExecutor:
    """Samples with ``sample``; a sequence for which it raises fails.

    Under ``hold`` each step stands still in its middle until ``step`` lets one go on, or ``go`` all of them.
    """

    def __init__(self, sample: Callable[[Sequence], int] = count_up) -> None:
        self.sample = sample
        self.plans: list[StepPlan] = []
        self.ended: list[Sequence] = []
        self.error: Exception | None = None  # what a step raises as a whole
        self.held = threading.Semaphore(0)  # released by each step that stands still
        self._gate = threading.Condition()
        self._holds, self._permits = False, 0

    def hold(self) -> None:
        with self._gate:
            self._holds = True

    def step(self) -> None:
        with self._gate:
            self._permits += 1
            self._gate.notify_all()

    def go(self) -> None:
        with self._gate:
            self._holds, self._permits = False, 0
            self._gate.notify_all()

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        self.plans.append(plan)
        with self._gate:
            if self._holds:
                self.held.release()
                assert self._gate.wait_for(lambda: self._permits or not self._holds, 60), "held and never let go"
                self._permits = max(0, self._permits - 1)
        if self.error is not None:
            raise self.error
        tokens: list[Token] = []
        failed: list[tuple[Sequence, BaseException]] = []
        for sequence in [*plan.decode_rows(), *(chunk.sequence for chunk in plan.chunks if chunk.samples)]:
            try:
                tokens.append(Token(sequence, self.sample(sequence)))
            except Exception as error:
                failed.append((sequence, error))
        return StepResult((time.monotonic(),), tokens, failed=failed)

    def release(self, sequence: Sequence) -> None:
        self.ended.append(sequence)


class Heard:
    """A listener that keeps what it hears; ``request()`` waits for the next request's record.

    ``since``: requests that arrived before are not kept. On an engine that others used before, the record of a request
    whose answer is already out may still be on its way.
    """

    def __init__(self, since: float = float("-inf")) -> None:
        self.since = since
        self.steps: list[StepRecord] = []
        self.requests: SimpleQueue[RequestRecord] = SimpleQueue()

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_request(self, record: RequestRecord) -> None:
        if record.arrival >= self.since:
            self.requests.put(record)

    def request(self) -> RequestRecord:
        return self.requests.get(timeout=30)


@dataclass
class Records:
    """A listener that keeps what it hears, and may act on the engine's thread between two steps."""

    steps: list[StepRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    act: Callable[[StepRecord], object] = lambda record: None

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)
        self.act(record)

    def on_request(self, record: RequestRecord) -> None:
        self.requests.append(record)

    @property
    def of(self) -> dict[str, RequestRecord]:
        return {record.id: record for record in self.requests}
