"""Which steps a calibration wants to see: scripts that make them, sized for the machine and the time.

Prefill tokens × decoding sequences × context × chunks behind computed tokens, as far as the engine's ceilings, KV pool and
model allow. Four kinds of scripts (:mod:`autotune.profiling.step_driver`):

- a *ladder* fills up with prompts, then decodes with all of them, half of them, a quarter, …;
- *alone*: prompts of many sizes by themselves, whole and in chunks;
- *mixed*: prompts of many sizes, whole and in chunks, beside sequences that decode;
- *bursts*: many short prompts in one step.

Sequences that decode together have prompts of unlike lengths, as they have when served. And *mixes*: loads to be served for a
while, whose steps are taken as they come (:mod:`autotune.profiling.steps`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import NamedTuple

from autotune.engines import Engine
from autotune.profiling.step_driver import Script, StepDriver
from runtime.records import StepRecord

LEVEL_STEPS = 5
"""Decode steps at each level of a ladder, the first of which does not count."""

REFERENCE_DECODES = 16
_REFERENCE = [64] * 8
_BETWEEN, _BEHIND = 2, 4  # decode steps before and after each prompt
_OUTPUT = 512  # tokens a request may put out before it is cancelled
_LADDERS, _ALONE, _MIXED, _BURSTS, _SERVING = 0.25, 0.2, 0.2, 0.1, 0.25  # shares of what the first round computes
_SERVING_LATER = 0.5  # on top of all scripts, in the others
_DECODES, _LEAST = 450, 0.35  # decode steps in a round; the share of it that computes prompts at least
_PIECE = 0.04  # of a round: the longest step while a script fills up
_CONTEXTS = (24, 128, 512, 2048, 8192, 32768)
_POOL_LADDERS = (
    (128, 0.03),
    (512, 0.06),
    (1500, 0.11),
    (4096, 0.06),
)  # (context, share of the whole time that filling takes)
_CHUNKED, _WHOLE = (0.06, 0.02), 0.04  # shares of the whole time: each long prompt alone, and all prompts in one piece
_BESIDE_POOL = 0.015  # share of the whole time: the prompts beside each pool ladder
_SMALLEST, _LARGEST = 16, 2048  # chunks of a long prompt
_BESIDE_LEVELS = (
    0,
    2,
)  # levels of a pool ladder at which prompts are computed beside it: all of its sequences, a quarter
_POOL_LEVEL_STEPS = 3  # decode steps at each level of a pool ladder
_POOL_STEPS = 160  # decode steps of a pool ladder with most of its sequences, at most
_POOL_DECODES = 250  # decode steps of all pool ladders and long prompts
_CHUNKS = (32, 128, 512, 2048)
_BESIDE = ((2, 256), (8, 64), (32, 128), (128, 64))  # (sequences, context) that prompts are mixed with
_BURST = ((16, 4), (16, 16), (64, 8), (32, 64))  # (tokens, prompts)
_SERVED = (
    (3, 384),
    (16, 96),
    (4, 1024),
    (40, 48),
    (12, 512),
    (8, 192),
    (28, 256),
)  # (sequences at once, prompt tokens)
_SERVED_CHUNKS = (4, 0.5, 0.125)  # of the mean prompt, in turn
_EVEN, _BURSTY = (
    0.5,
    3.0,
)  # coefficients of variation of the time between arrivals, in turn: soon full, or many prompts at once
_SERVED_OUTPUT = 64
_LONGEST_STAY = 2  # of a round: longer than that a load is not to last for all of it to be there at once
_SERVED_S = 2.0  # seconds that a mix is served for at least
_FEW, _FEW_OUTPUT = (16, 16, 16, 32), 8  # prompts and answers where the time is short
_UNLIKE = 1.0  # coefficient of variation of the lengths of sequences that decode together

Filling = Generator[None, StepRecord, list[str]]
Wave = tuple[Sequence[int], int]
"""Prompts submitted together, and the chunk size they are computed with."""


class Pilot(NamedTuple):
    """The machine's speed, roughly: seconds of a prompt token, of one in a long prompt, and of a decode step."""

    token: float
    bulk: float
    step: float


class Mix(NamedTuple):
    """A load: ``rate`` requests/s of about ``prompt`` and ``output`` tokens for ``seconds``; prompts in chunks of ``chunk``.

    ``cv``: coefficient of variation of the time between arrivals.
    """

    rate: float
    prompt: int
    output: int
    seconds: float
    chunk: int
    cv: float


class CalibrationPlan:
    """Scripts for one round of about ``seconds``; the same in every round."""

    def __init__(self, driver: StepDriver, engine: Engine, seed: int) -> None:
        limits = engine.effective_limits
        self._driver, self._seed = driver, seed
        self._slots, self._budget, self._chunk = limits.max_batch_size, limits.token_budget, limits.chunk_size
        self._pool = int(engine.facts.kv_tokens * 0.9)
        self._output = max(1, min(_OUTPUT, driver.longest // 4))
        self._longest = max(1, driver.longest - self._output)
        self._piece = 0
        self._seconds, self._pilot = 0.0, Pilot(0.0, 0.0, 0.0)
        self._scripts: list[Callable[[], Script]] = []
        self._pool_scripts: list[Callable[[], Script]] = []

    def pilot(self, tokens: int = 256) -> Script:
        """A prompt of at most ``tokens``, twice: the speed of the machine."""
        size = min(tokens, self._longest, self._budget, self._chunk)
        return self._alone([(size, size)] * 2)

    def reference(self) -> Script:
        """The same few decodes whenever it is run."""
        batch = max(1, self._fit(len(_REFERENCE), _REFERENCE[0]))
        yield from self._filled([min(n, self._longest) for n in _REFERENCE[:batch]], sum(_REFERENCE))
        for _ in range(REFERENCE_DECODES):
            yield

    def scripts(self, seconds: float, pilot: Pilot, whole: float = 0.0) -> list[Callable[[], Script]]:
        """What fills a round of ``seconds`` on a machine as fast as ``pilot``. No script is left out but for its size.

        ``whole``: seconds of the calibration, of which some fill the pool in the first round; 0: none do.
        """
        self._seconds, self._pilot = max(_LEAST * seconds, seconds - _DECODES * pilot.step), pilot
        self._piece = max(64, min(self._budget, int(_PIECE * seconds / pilot.token)))
        self._scripts = [*self._ladders(), *self._prompts(), *self._mixtures()]
        whole = max(_LEAST * whole, whole - _POOL_DECODES * pilot.step)
        self._pool_scripts = [*self._pool_ladders(whole), *self._long_prompts(whole)]
        return self._scripts

    def round(self, number: int) -> list[Callable[[], Script] | Mix]:
        """What round ``number`` holds: every script, and loads that are served; in long rounds after the first more of them.

        Clean steps of one kind are much alike; those of a load are not, and a profile is of loads. After :meth:`scripts`.
        """
        return [*self._scripts, *([] if number else self._pool_scripts), *self._mixes(number)]

    def optional(self, task: Callable[[], Script] | Mix) -> bool:
        """Whether the first round does without ``task`` where the time is over: it fills the pool, which takes long."""
        return task in self._pool_scripts

    def _mixes(self, number: int) -> list[Mix]:
        """The loads of round ``number``, those that fit; in a short round not all of them."""
        made = []
        more = number and _SERVING * self._seconds >= _SERVED_S  # a load of less than that tells little of itself
        share = (_SERVING_LATER if more else _SERVING) * self._seconds
        each = max(share / len(_SERVED), min(_SERVED_S, share))
        for index, (batch, prompt) in enumerate(_SERVED):
            prompt = min(prompt, max(1, self._longest // 4))
            chunk = max(16, int(_SERVED_CHUNKS[(number + index) % len(_SERVED_CHUNKS)] * prompt))
            batch = self._fit(batch, 2 * prompt)
            if batch < 2:
                continue
            output = min(_SERVED_OUTPUT, self._output)
            # as many at once as Little's law says, were a step with prompts in it as long as the tokens in it are; in a load
            # that is shorter than a request all of them, if the round has time for that
            stay = output * self._pilot.step + batch * prompt * self._pilot.token
            rate = batch / (min(stay, each) if stay <= _LONGEST_STAY * self._seconds else stay)
            cv = _BURSTY if (number + index) % 2 else _EVEN
            made.append(Mix(rate, prompt, output, each, min(chunk, self._piece, self._chunk), cv))
        fit = max(1, int(share / each))
        begun = fit * number  # somewhere else each time
        return [made[(begun + i) % len(made)] for i in range(min(fit, len(made)))] if made else []

    def least(self) -> list[Callable[[], Script] | Mix]:
        """A little of all that serving does, where a round has no time for it. After :meth:`scripts`."""
        few, long, chunk = self._few()
        batch = min(2, self._slots)
        rate = batch / (_FEW_OUTPUT * self._pilot.step + batch * few[0] * self._pilot.token)
        seconds = max(_SERVED_S, 4 / rate)
        made: list[Callable[[], Script] | Mix] = [
            partial(self._ladder, few), partial(self._ladder, [long]), self._little()
        ]  # fmt: skip
        return [*made, Mix(rate, few[0], min(_FEW_OUTPUT, self._output), seconds, chunk, _EVEN)]

    def _few(self) -> tuple[list[int], int, int]:
        """A few short prompts, a longer one, and a chunk size that cuts it, for where the time is short."""
        several = [max(1, min(n, self._longest)) for n in _FEW]
        few = several[: max(1, self._fit(len(several), max(several)))]
        return few, max(1, min(3 * _FEW[-1], self._longest)), max(1, min(_FEW[-1] // 2, self._chunk))

    def _little(self) -> Callable[[], Script]:
        """A short prompt and a longer one in chunks, beside a few sequences that decode."""
        few, long, chunk = self._few()
        waves: list[Wave] = [([min(_FEW[-1], chunk)], chunk), ([long], chunk)]
        return partial(self._mixed, few, waves)

    def _ladders(self) -> list[Callable[[], Script]]:
        contexts = [n for n in _CONTEXTS if 1.5 * n <= self._longest] or [max(1, self._longest * 2 // 3)]
        tokens = self._tokens(_LADDERS / len(contexts))
        made: list[Callable[[], Script]] = []
        for context in contexts:
            batch = self._fit(max(1, tokens // context), context)
            if batch and context <= max(tokens, contexts[0]):
                made.append(partial(self._ladder, self._spread(batch, context)))
        return made

    def _prompts(self) -> list[Callable[[], Script]]:
        most = max(8, min(self._tokens(_ALONE / 4), self._longest))
        top = min(most, self._budget, self._chunk)
        chunked = [(min(most, 24 * c), c) for c in _CHUNKS if c <= min(top, most // 2)]
        made = [partial(self._alone, [(size, size) for size in _powers(8, top)])]
        return [*made, partial(self._alone, chunked)] if chunked else [*made]

    def _pool_ladders(self, whole: float) -> list[Callable[[], Script]]:
        """Ladders as wide and as long as the KV pool and the slots hold, or as can be filled in their share of ``whole``."""
        made: list[Callable[[], Script]] = []
        for context, share in _POOL_LADDERS:
            if 1.5 * context > self._longest:
                continue
            tokens = whole * share / self._pilot.bulk
            rng = random.Random(f"{self._seed} beside {context}")
            beside = [self._sizes(rng, whole * _BESIDE_POOL / len(_BESIDE_LEVELS)) for _ in _BESIDE_LEVELS]
            free = self._pool - max(map(sum, beside))
            batch = min(self._slots - 1, self._budget // 2, int(tokens / context), free // (context + _POOL_STEPS))
            if batch > 1:
                made.append(partial(self._pool_ladder, self._spread(batch, context), beside))
        return made

    def _long_prompts(self, whole: float) -> list[Callable[[], Script]]:
        """Long prompts alone, in chunks of many sizes; and whole ones of sizes that are no powers of two."""
        rng = random.Random(f"{self._seed} climbs")  # of a seed, the same sizes as ever
        chunked = [self._sizes(rng, whole * share) for share in _CHUNKED]
        alone = self._sizes(rng, whole * _WHOLE, self._longest)
        made = [partial(self._chunked, sizes) for sizes in chunked if len(sizes) > 1]
        return [*made, partial(self._alone, [(size, size) for size in alone])] if len(alone) > 1 else [*made]

    def _sizes(self, rng: random.Random, seconds: float, largest: int = _LARGEST) -> list[int]:
        """Log-uniform chunk sizes, in all as many tokens as ``seconds`` compute and a sequence holds."""
        largest = min(largest, self._chunk, self._budget // 2, self._longest)
        left = int(min(seconds / self._pilot.bulk, self._longest))
        found: list[int] = []
        while left >= _SMALLEST <= largest:
            size = round(math.exp(rng.uniform(math.log(_SMALLEST), math.log(largest))))
            found.append(min(size, left))
            left -= found[-1]
        return found

    def _mixtures(self) -> list[Callable[[], Script]]:
        made: list[Callable[[], Script]] = []
        tokens = self._tokens(_MIXED / len(_BESIDE))
        for batch, context in _BESIDE:
            context = min(context, max(1, self._longest * 2 // 3))
            batch = self._fit(batch, context)
            left = tokens - batch * context
            if batch and left > 32:
                top = max(16, min(left // 3, self._longest, self._chunk, self._budget - batch))
                waves: list[Wave] = [([size], size) for size in _powers(16, top, 4)]
                waves += [([min(6 * c, self._longest)], c) for c in _CHUNKS if 18 * c <= left]
                made.append(partial(self._mixed, self._spread(batch, context), waves))
        if not made and self._fit(1, max(_FEW)):
            made = [self._little()]  # bursts alone are no measure of what serving mixes
        tokens = min(self._tokens(_BURSTS), self._budget - 1)
        bursts: list[Wave] = [
            ([size] * count, size)
            for size, count in _BURST
            if size <= min(self._longest, self._chunk) and size * count <= tokens and count < self._slots
        ]
        return [*made, partial(self._mixed, [min(32, self._longest)], bursts)] if bursts else made

    def _tokens(self, share: float) -> int:
        """Prompt tokens that so large a share of the round computes."""
        return int(min(self._seconds * share / self._pilot.token, self._pool))

    def _fit(self, batch: int, context: int) -> int:
        """As many of ``batch`` sequences of about ``context`` as slots and KV pool hold beside a prompt."""
        each = 1.5 * context + self._output
        return max(0, min(batch, self._slots - 1, self._budget - 1, int((self._pool - self._longest) / each)))

    def _spread(self, batch: int, context: int) -> list[int]:
        """Log-normal lengths, ``context`` on average."""
        rng = random.Random(f"{self._seed} {batch} {context}")
        sigma = math.sqrt(math.log(1 + _UNLIKE**2))
        drawn = [rng.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(batch)]
        scale = context * batch / sum(drawn)
        return [max(1, min(self._longest, 4 * context, round(scale * each))) for each in drawn]

    # -- scripts ------------------------------------------------------------------------------------------------------

    def _filled(self, lengths: Sequence[int], piece: int) -> Filling:
        """Have sequences of ``lengths`` decode; returns their ids, with a step that held nothing but them."""
        self._driver.bound(budget=piece + len(lengths), chunk=piece)
        yield  # the starter's step
        names = self._driver.submit(lengths, self._output)
        record = yield
        while record.prefill_tokens or record.waiting:
            record = yield
        return names

    def _ladder(self, lengths: Sequence[int]) -> Script:
        names = yield from self._filled(lengths, self._piece)
        while True:
            for _ in range(LEVEL_STEPS):
                yield
            if len(names) == 1:
                return
            half = len(names) // 2
            self._driver.cancel(names[half:])
            del names[half:]

    def _pool_ladder(self, lengths: Sequence[int], beside: Sequence[Sequence[int]]) -> Script:
        """A ladder with prompts beside some of its levels: a long one in chunks of so many sizes, and each size by itself."""
        names = yield from self._filled(lengths, self._piece)
        waves = dict(zip(_BESIDE_LEVELS, beside, strict=True))
        level = 0
        while True:
            for _ in range(_POOL_LEVEL_STEPS):
                yield
            if sizes := waves.get(level):
                yield from self._in_chunks(len(names), sizes)
            if len(names) == 1:
                return
            half = len(names) // 2
            self._driver.cancel(names[half:])
            del names[half:]
            level += 1

    def _chunked(self, sizes: Sequence[int]) -> Script:
        yield
        yield from self._in_chunks(0, sizes)

    def _in_chunks(self, beside: int, sizes: Sequence[int]) -> Script:
        """One prompt in chunks of ``sizes``, one after the other, beside so many decodes."""
        names = self._driver.submit([sum(sizes)], self._output)
        for chunk in sizes:
            self._driver.bound(budget=beside + chunk, chunk=chunk)
            yield
        yield from self._computed()
        self._driver.cancel(names)

    def _alone(self, prompts: Sequence[tuple[int, int]]) -> Script:
        """Prompts of (length, chunk) one after the other."""
        names: list[str] = []
        yield
        for length, chunk in prompts:
            self._driver.cancel(names)
            self._driver.bound(budget=chunk, chunk=chunk)
            names = self._driver.submit([length], self._output)
            yield from self._computed()

    def _mixed(self, lengths: Sequence[int], waves: Sequence[Wave]) -> Script:
        yield from self._filled(lengths, self._piece)
        for prompts, chunk in waves:
            for _ in range(_BETWEEN):
                yield
            self._driver.bound(budget=len(lengths) + chunk * len(prompts), chunk=chunk)
            names = self._driver.submit(prompts, self._output)
            yield from self._computed()
            self._driver.cancel(names)

    def _computed(self) -> Script:
        """Until the prompts are computed, and the steps behind them."""
        record = yield
        while record.prefill_tokens or record.waiting:
            record = yield
        for _ in range(_BEHIND - 1):
            yield


def _powers(low: int, high: int, ratio: int = 2) -> list[int]:
    """``low`` times powers of ``ratio``, up to ``high``, and ``high``."""
    found = [n for k in range(20) if (n := low * ratio**k) <= 0.75 * high]
    return [*found, high]
