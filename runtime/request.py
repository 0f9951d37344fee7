"""What a client asks for (Request, SamplingParams) and what the scheduler keeps of it (Sequence)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.records import FinishReason, RequestRecord

MAX_STOPS, MAX_STOP_LENGTH, MAX_STOP_TOKEN_IDS = 64, 1024, 256
"""What one request may ask for: every token of it is held against these, in the step that everybody waits for."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep all tokens; ``min_p`` drops tokens less likely than
    ``min_p`` times the likeliest. ``stop``: texts, and ``stop_token_ids``: ids, at which it ends; ``ignore_eos``: the model's
    own end-of-sequence tokens do not end it. ``repetition_penalty`` above 1 divides positive (multiplies negative) logits of
    tokens already in prompt or output (Keskar et al. 2019). ``seed`` makes the request's own draws repeatable whatever else
    is in the batch. ``max_tokens`` None fills what the context leaves. ``logprobs`` n returns the chosen token's
    log-probability and those of the n likeliest (of the unmodified distribution). Raises ``ValueError`` for values out of
    bounds.
    """

    max_tokens: int | None = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", _as_tuple("stop", self.stop, "texts"))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids, "token ids"))
        _within("max_tokens", self.max_tokens, 1, None, integer=True, optional=True)
        _within("temperature", self.temperature, 0, 100)
        _within("top_k", self.top_k, 0, None, integer=True)
        _within("top_p", self.top_p, 0, 1, open_low=True)
        _within("min_p", self.min_p, 0, 1)
        _within("repetition_penalty", self.repetition_penalty, 0.001, 100)
        _within("seed", self.seed, -(2**63), 2**63 - 1, integer=True, optional=True)
        _within("logprobs", self.logprobs, 0, 100, integer=True, optional=True)
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError(f"stop is {self.stop!r}; every stop string must be non-empty text")
        longest = max(map(len, self.stop), default=0)
        if len(self.stop) > MAX_STOPS or longest > MAX_STOP_LENGTH:
            raise ValueError(
                f"stop has {len(self.stop)} texts of up to {longest} characters; it must have at most {MAX_STOPS} of at most "
                f"{MAX_STOP_LENGTH}"
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; it must have at most {MAX_STOP_TOKEN_IDS}"
            )
        for token_id in self.stop_token_ids:
            _within("stop_token_ids", token_id, 0, None, integer=True)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _as_tuple(name: str, value: Any, items: str) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be a list of {items}") from None


def _within(
    name: str,
    value: Any,
    low: float,
    high: float | None,
    *,
    integer: bool = False,
    optional: bool = False,
    open_low: bool = False,
) -> None:
    if value is None and optional:
        return
    kind = int if integer else (int, float)
    bad = (
        isinstance(value, bool)
        or not isinstance(value, kind)
        or (isinstance(value, float) and not math.isfinite(value))
    )
    if bad or value < low or (open_low and value == low) or (high is not None and value > high):
        bound = f"{'above' if open_low else 'at least'} {low:g}" + ("" if high is None else f" and at most {high:g}")
        raise ValueError(f"{name} is {value!r}; it must be {'a whole number ' if integer else ''}{bound}")


@dataclass(slots=True, eq=False)
class Request:
    """One accepted request: token ids in, and everything that says how to treat it.

    ``arrival`` is on the engine's clock. ``deadline`` (absolute, same clock) orders requests; passing it cancels nothing.
    ``expires`` (absolute) ends the request with TIMEOUT, whatever its state. ``block_hashes`` are the chained hashes of the
    prompt's full KV blocks, empty when prefixes are not to be shared.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    arrival: float
    priority: int = 0
    tenant: str = ""
    request_class: str = "default"
    deadline: float | None = None
    expires: float | None = None
    block_hashes: tuple[int, ...] = ()
    prompt_len: int = -1  # for simulations, whose prompts have a length but no tokens

    def __post_init__(self) -> None:
        if self.prompt_len < 0:
            self.prompt_len = len(self.prompt)

    @property
    def size(self) -> int:
        """Prompt tokens: what orderings know of its length."""
        return self.prompt_len

    @property
    def work(self) -> int:
        """Prompt and output tokens, at most."""
        return self.prompt_len + self.max_tokens


class Sequence:
    """The scheduler's state of one request. Only the scheduler writes here, but for ``output`` and ``data``.

    ``output`` (token ids) belongs to whoever samples; ``data`` to the executor. While a sequence decodes, ``computed``,
    ``generated`` and ``token_times`` stand still as of ``joined`` (the scheduler's step index) and are brought up to date
    when it leaves: that is what keeps a decode step's cost independent of the batch.
    """

    __slots__ = (
        "blocks", "cached", "cause", "computed", "data", "epoch_first", "generated", "hashes", "joined", "key", "output",
        "own_key", "pending", "place", "preemptions", "relegated", "request", "retry_after", "scheduled", "state", "target",
        "token_times", "uncached", "was_relegated",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self.blocks: list[int] = []  # KV blocks held, in order of position
        self.hashes: list[int] = list(request.block_hashes)  # of the known full blocks, prompt then output
        self.computed = 0  # tokens whose KV is in the pool
        self.target = request.prompt_len  # tokens to compute before the next one is sampled
        self.generated = 0  # output tokens sampled
        self.cached = 0  # prompt tokens found in the prefix cache at first admission
        self.joined = -1  # step index at which it began to decode, -1 when it does not
        self.place = 0  # its number among all that ever joined those that decode
        self.preemptions = 0
        self.scheduled: float | None = None
        self.epoch_first = -1
        self.token_times: list[float] = []
        self.output: list[int] = []
        self.state = "waiting"  # waiting | prefill | decode | finished
        self.key = 0.0  # its place in the waiting order
        self.relegated: float | None = None  # the key its ordering gave it, since it waits behind the others as a miss
        self.own_key: float | None = None  # what the scheduler's own ordering gave, while another holds
        self.was_relegated = False  # at any time
        self.uncached = 0  # tokens to compute, less those in the prefix cache when it was queued or late at its turn
        self.pending = 0  # those of them that nobody else was to compute before
        self.cause = ""
        self.retry_after: float | None = None  # s until one like it may be computed, if it is not
        self.data: Any = None

    def record(self, reason: FinishReason, finished: float, epoch: int) -> RequestRecord:
        """The record of this sequence, which has just ended; ``epoch`` is the knob setting in force."""
        request = self.request
        epoch_last = epoch if self.epoch_first >= 0 else -1
        return RequestRecord(
            request.id, request.arrival, self.scheduled, finished, self.token_times, request.prompt_len, self.generated,
            self.cached, self.preemptions, reason, request.request_class, request.tenant, request.priority,
            self.epoch_first, epoch_last, self.cause, self.retry_after, self.was_relegated,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Sequence {self.request.id} {self.state} computed={self.computed}/{self.target} out={self.generated}>"


TokenHasher = Callable[[Sequence], None]
"""Extends ``Sequence.hashes`` over the tokens it has generated, so that its output can be shared as a prefix too."""
