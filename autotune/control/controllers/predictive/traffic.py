"""The traffic: lengths of requests, sizes of steps, what limits them, and the demand in prompt tokens a second."""

from __future__ import annotations

import math
from collections import deque

from autotune.control.controllers.parts.running_statistics import Recent
from autotune.control.controllers.predictive import constants
from autotune.control.controllers.predictive.attainment_model import Requests
from runtime.records import LimitedBy, RequestRecord, StepRecord


class Traffic:
    """Of the latest 256 requests and steps; shares of steps decay with a memory of some fifty."""

    def __init__(self) -> None:
        self.prompts = Recent(constants.WINDOW)  # tokens to compute of each request's prompt
        self.outputs = Recent(constants.WINDOW)
        self._samples: tuple[list[float], list[float]] | None = (
            None  # of prompts and of gaps, since they were last asked for
        )
        self._prompt_tokens = self._to_compute = 0.0  # decaying sums over requests
        self.contexts = Recent(constants.WINDOW)  # mean context of a decode, by step
        self.decodes = Recent(constants.WINDOW)
        self.alone = 0.0  # step of decodes alone, s: a decaying mean; 0 before there were any
        self._latest: deque[tuple[int, float]] = deque(maxlen=constants.WINDOW)  # decodes and seconds of steps
        self.preemptions = 0.0  # decaying count
        self.bound = 0.0  # decaying shares of steps: that anything limited,
        self.slots_bound = 0.0  # that max_batch_size limited,
        self.tokens_bound = 0.0  # and that token_budget or chunk_size limited, rather than the per-step budget
        self._tokens = self._reads = self._pairs = 0.0  # decaying sums over steps with prompts
        self._idle = True

    def step(self, record: StepRecord, seconds: float, ceiling: int) -> None:
        """A step took ``seconds``; ``ceiling``: the token budget that was last decided on, above all per-step ones."""
        self.preemptions += record.preemptions - 0.002 * self.preemptions
        limited, weight = record.limited_by, constants.MEMORY
        short = (limited is LimitedBy.BUDGET or limited is LimitedBy.CHUNK) and record.budget_used >= ceiling
        self.bound += weight * ((limited is not LimitedBy.DEMAND) - self.bound)
        self.slots_bound += weight * ((limited is LimitedBy.SLOTS) - self.slots_bound)
        self.tokens_bound += weight * (short - self.tokens_bound)
        decodes, prefill = record.decodes, record.prefill_tokens
        if decodes:
            self.decodes.add(decodes)
            self._latest.append((decodes, seconds))
            self.contexts.add(record.decode_context / decodes)
            if not prefill:
                self.alone += weight * (seconds - self.alone) if self.alone else seconds
        if prefill:
            self._tokens += prefill - weight * self._tokens
            self._reads += record.prefill_context - weight * self._reads
            self._pairs += record.prefill_attention - weight * self._pairs

    def context(self, decodes: int) -> int:
        """Tokens of context of so many decodes, as they were lately."""
        return int(decodes * self.contexts.mean)

    def chunk(self, tokens: int) -> tuple[int, int]:
        """Context and attention pairs of so many prompt tokens, as in the latest steps; of one fresh prompt before any."""
        if self._tokens < 1 or tokens < 1:
            return tokens, tokens * (tokens + 1) // 2
        return int(tokens * self._reads / self._tokens), int(tokens * self._pairs / self._tokens)

    def in_time(self, seconds: float) -> int:
        """The most decodes that one of the latest steps held and took no more than ``seconds``; 0 if none did."""
        return max([decodes for decodes, took in self._latest if took <= seconds], default=0)

    def request(self, record: RequestRecord) -> None:
        self._samples = None
        self.prompts.add(record.prompt_tokens - record.cached_tokens)
        self._prompt_tokens += record.prompt_tokens - constants.MEMORY * self._prompt_tokens
        self._to_compute += record.prompt_tokens - record.cached_tokens - constants.MEMORY * self._to_compute
        self.outputs.add(record.output_tokens)

    @property
    def uncached(self) -> float:
        """Share of prompts that was to be computed; 1 before any request has ended."""
        return self._to_compute / self._prompt_tokens if self._prompt_tokens else 1.0

    def requests(self, demand: float, *, stay: bool) -> Requests | None:
        """Requests as they came lately, where they ask for so many prompt tokens a second; None before any has ended."""
        if self._samples is None:
            prompts = [max(1.0, tokens) for tokens in self.prompts.middles(constants.SAMPLE)]
            gaps = [tokens - 1 for tokens in self.outputs.middles(constants.SAMPLE) if tokens > 1]
            self._samples = prompts, gaps
        prompts, gaps = self._samples
        return Requests(demand * len(prompts) / sum(prompts), prompts, gaps, stay) if prompts else None

    def demand_limits(self) -> bool:
        """Whether demand is what limits: once anything else limits below 1% of the steps, until it limits 10%. With that gap no
        knob turns at every decision."""
        self._idle = self.bound < (10 * constants.BINDS if self._idle else constants.BINDS)
        return self._idle


class Demand:
    """Demand in prompt tokens a second: computed, more of them waiting than before, or lost from the queue; with a memory of
    so many ``seconds``. Until so long has passed, the mean so far."""

    def __init__(self, seconds: float = constants.DEMAND_S) -> None:
        self._memory = seconds
        self._tokens = self._seconds = 0.0
        self._waiting = 0
        self._last = -math.inf

    def step(self, record: StepRecord) -> None:
        """A step with sound times has ended."""
        passed = record.end - self._last
        if not 0 <= passed < math.inf:  # the first step, or a clock that was put back
            passed = record.end - record.start
        passed = min(passed, constants.GAP_S)
        self._last = record.end
        keep = math.exp(-passed / self._memory)
        self._tokens = (
            keep * self._tokens + record.prefill_tokens * record.steps + record.waiting_tokens - self._waiting
        )
        self._seconds = keep * self._seconds + (1 - keep) * self._memory
        self._waiting = record.waiting_tokens

    def lost(self, tokens: float) -> None:
        """A request has ended without having begun, with so many tokens of its prompt to compute."""
        self._tokens += tokens

    @property
    def per_second(self) -> float:
        """0 before anything was seen."""
        return max(0.0, self._tokens) / self._seconds if self._seconds > 0 else 0.0
