"""What orderings learn from an engine's records: how long answers are, and how fast tokens come."""

from __future__ import annotations

from collections import deque
from typing import Final

from runtime.records import RequestRecord, StepRecord

_WINDOW: Final = 256
"""Answers that a mean is taken over: the latest."""
_ENOUGH: Final = 16
"""Answers to prompts of like length from which on their mean counts, and not that of the whole class."""
_KEPT: Final = 4096
"""Means kept at once. Clients name their classes, and might name ever new ones."""
_FADE: Final = 0.98
"""What a rate remembers of the steps or requests before, with each new one: some fifty of them count."""


class _Recent:
    """The mean of the latest numbers, in constant time."""

    __slots__ = ("_kept", "_sum")

    def __init__(self) -> None:
        self._kept: deque[int] = deque()
        self._sum = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, value: int) -> None:
        self._kept.append(value)
        self._sum += value
        if len(self._kept) > _WINDOW:
            self._sum -= self._kept.popleft()

    @property
    def mean(self) -> float:
        return self._sum / len(self._kept)


class OutputLengths:
    """Mean output tokens of the latest 256 requests that ran to their end: those of the class whose prompts are as long to within
    a factor of two, if 16 such are known; else those of the class; else all.

    The mean is what an order of expected work needs (Smith 1956, Rothkopf 1966). Order is asked before the first token, so that
    nothing is gained from how long an answer is already. Short answers end first, so that in its first minutes an engine
    takes answers for shorter than they are.
    """

    def __init__(self) -> None:
        self._means: dict[tuple[str, int] | str | None, _Recent] = {}

    def observe(self, record: RequestRecord) -> None:
        if not record.completed:
            return
        name = record.request_class
        for key in (None, name, (name, record.prompt_tokens.bit_length())):
            mean = self._means.get(key)
            if mean is None:
                if len(self._means) > _KEPT:
                    self._means = {None: self._means[None]}
                mean = self._means[key] = _Recent()
            mean.add(record.output_tokens)

    def expected(self, request_class: str, prompt_tokens: int) -> float:
        """Tokens; 0 while no answer is known."""
        alike = self._means.get((request_class, prompt_tokens.bit_length()))
        if alike is None or len(alike) < _ENOUGH:
            alike = self._means.get(request_class) or self._means.get(None)
        return 0.0 if alike is None else alike.mean


class TokenTimes:
    """Seconds that a prompt token and an output token take at present, each 0 while it is not known.

    A prompt token: the seconds of the steps that held prompts over the prompt tokens in them. An output token: the seconds
    from the first to the last token of the requests that ran to their end over the tokens in between.
    """

    def __init__(self) -> None:
        self._prompts = self._prompt_s = self._outputs = self._output_s = 0.0

    def on_step(self, record: StepRecord) -> None:
        if not record.prefill_tokens or record.failed:
            return
        self._prompts = _FADE * self._prompts + record.prefill_tokens
        self._prompt_s = _FADE * self._prompt_s + (record.end - record.start)

    def on_request(self, record: RequestRecord) -> None:
        gaps = len(record.token_times) - 1
        if not record.completed or gaps < 1:
            return
        self._outputs = _FADE * self._outputs + gaps
        self._output_s = _FADE * self._output_s + (record.token_times[-1] - record.token_times[0])

    @property
    def prompt_token_s(self) -> float:
        return self._prompt_s / self._prompts if self._prompts else 0.0

    @property
    def output_token_s(self) -> float:
        return self._output_s / self._outputs if self._outputs else 0.0
