"""Predicting the time of a step: the protocol, the table of its terms, and the learner, which needs to know nothing about
the hardware.

A step is counted (:class:`StepFeatures`), and its time is made of :data:`TERMS`: amounts that follow from the counts, times
coefficients. The table is the only list of them. ``coefficient`` is for the offline fit, the model it gives and the profile
(``autotune/cost``), ``pieces`` for the learner; the calibration looks there for what its steps do not tell. A new term is
a row at the end. Profiles written before it hold no coefficient for it, which then is 0.

:class:`StepLearner` fits two linear pieces to the steps it sees and predicts their maximum::

    decode piece   a0 + a1·decodes + a2·context
    mixed piece    b0 + b1·prefill tokens + b2·decodes + b3·context + b4·attention pairs

Where memory and compute overlap, a step takes the longer of two times, and each piece becomes one of them; where they
add up, the mixed piece holds the sum. A step without prompts belongs to the decode piece; any other to the piece that
comes closer to it. Drafted tokens count as prompt tokens here. Where steps are recorded for a few sizes (CUDA graphs), the
decodes of a step of decodes alone count as the rows that it is padded to, and the prompt tokens of any other with its dummies,
for dummies are computed as others are: the learner has no other input that says what a row costs. Each piece is fitted by
recursive least squares with directional forgetting (Cao and Schwartz, Automatica 36, 2000): only what a new step speaks about is
forgotten, so the covariance cannot wind up while the inputs stand still, and a change of speed is followed even then. Residuals
are relative and clipped (Huber); coefficients never go below zero.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Protocol, Self

from runtime.records import StepRecord
from runtime.shared.least_squares import RecursiveLeastSquares

if TYPE_CHECKING:
    from runtime.llm.plan import StepPlan

__all__ = [
    "NO_GRAPHS",
    "TERMS",
    "Group",
    "Knowledge",
    "Piece",
    "RecursiveLeastSquares",
    "StepFeatures",
    "StepGraphs",
    "StepLearner",
    "StepModel",
    "Term",
    "learned_terms",
    "next_size",
]

_PRIOR_ERROR = 0.3
"""How far off a machine may be, relatively, from what a profile of it said."""


class StepFeatures(NamedTuple):
    """What a step is counted by; the same numbers as in :class:`runtime.records.StepRecord`, where they are defined."""

    decodes: int
    decode_context: int
    prefill_tokens: int
    prefill_context: int
    prefill_attention: int
    chunks: int = 0
    drafted: int = 0

    @classmethod
    def of(cls, record: StepRecord) -> Self:
        """Those of a step that was made."""
        return cls(
            record.decodes,
            record.decode_context,
            record.prefill_tokens,
            record.prefill_context,
            record.prefill_attention,
            record.chunks,
            record.drafted,
        )

    @classmethod
    def of_plan(cls, plan: StepPlan) -> Self:
        """Those of a step that is planned; of a plan that stands for several, of the first."""
        tokens = context = pairs = 0
        chunks = plan.chunks
        for _, start, count, _, _ in chunks:
            tokens += count
            context += start + count
            pairs += count * start + count * (count + 1) // 2
        decodes, read, drafted = plan.n_decode, plan.decode_context, 0
        if plan.drafts:
            decodes += len(plan.drafts)
            read += sum([draft.start + draft.count for draft in plan.drafts])
            drafted = sum([len(draft.drafted) for draft in plan.drafts])
        return cls(decodes, read, tokens, context, pairs, len(chunks), drafted)


@dataclass(frozen=True)
class StepGraphs:
    """The steps that an engine has recorded. One that fits a recording runs as the smallest that holds it, and dummies fill the
    rest; any other runs launch by launch, and is not padded.

    ``decodes``: for how many rows, of steps of decodes alone. ``prompts``: for how many tokens, those of decodes among them, of
    steps with prompts, which may hold up to ``sequences`` sequences. In ascending order; empty: no such step is recorded. One
    with drafted tokens never is. False where nothing is recorded.
    """

    decodes: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    sequences: int = 0

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prompts)

    def rows_of(self, step: StepFeatures) -> int:
        """How many rows ``step`` computes, dummies included; 0 if it runs launch by launch. Whoever asks for every step has
        this written out, by the tables below."""
        tokens, sizes = step.decodes + step.prefill_tokens, self.prompts
        if not step.prefill_tokens:
            sizes = self.decodes
        elif step.decodes + step.chunks > self.sequences:
            return 0
        return 0 if step.drafted else next_size(sizes, tokens)

    def rows_by_decodes(self) -> list[int]:
        """How many rows a step of so many decodes alone computes; as far as such steps are recorded."""
        return _table(self.decodes)

    def rows_by_tokens(self) -> list[int]:
        """How many tokens a step with prompts that holds so many computes; as far as such steps are recorded."""
        return _table(self.prompts)


NO_GRAPHS: Final = StepGraphs()


def next_size(sizes: Sequence[int], number: int) -> int:
    """The least of ``sizes``, which ascend, that is no less than ``number``; 0 if there is none."""
    at = bisect_left(sizes, number)
    return sizes[at] if at < len(sizes) else 0


def _table(sizes: Sequence[int]) -> list[int]:
    made = [0]
    for size in sizes:
        made += [size] * (size + 1 - len(made))
    return made


Group = Literal["outside", "memory", "compute"]
"""Which part of a machine a cost scales with: the host around the step, what is read, what is computed."""

Piece = Literal["decode", "mixed"]
Curve = Literal["linear", "segments", "saturating", "tiles"]
_BOTH: tuple[Piece, ...] = ("decode", "mixed")


@dataclass(frozen=True)
class Term:
    """A row of :data:`TERMS`. ``amount``: how many ``unit`` a step holds, of its counts; of arrays of them too.

    For the offline model: ``coefficient`` is the seconds that one of them costs, by the name they have in a profile, and at most
    ``most``; empty where it takes no such term. ``curve``: ``segments`` has a coefficient for each of several ranges of the
    amount, ``saturating`` is that of 1 − e^(−amount/scale), ``tiles`` depends on how many tiles the tokens fill, and is nothing
    within the first. ``overlap_only``: not in a sum, where nothing tells it from ``step``. ``unrecorded_only``: of steps that run
    launch by launch on an engine that records steps with prompts, and not in a model of another. ``required``: every profile with
    a cost model has it; others are 0 where a profile lacks them. ``former``: only of profiles that have it; no fit takes it any
    more.

    For the online learner: the ``pieces`` it is an input of, divided by ``typical``, so that all inputs are of order one.
    """

    name: str
    unit: str
    amount: Callable[[StepFeatures], Any]
    coefficient: str = ""
    group: Group = "outside"
    most: float = 1e3
    curve: Curve = "linear"
    overlap_only: bool = False
    unrecorded_only: bool = False
    pieces: tuple[Piece, ...] = ()
    typical: float = 1.0
    required: bool = False
    former: bool = False

    @property
    def padded(self) -> bool:
        """Whether dummy rows of a recorded step count, for the offline model and for a further input of the learner: curves are
        of tokens computed."""
        return self.curve != "linear"


def computed(step: StepFeatures) -> Any:
    """Tokens that a step puts through the model."""
    return step.decodes + step.drafted + step.prefill_tokens


def further_rows(tokens: Any, tile: int) -> Any:
    """Rows of whole tiles that ``tokens`` take beyond the first tile: products on GPUs are computed by the tile."""
    return (tokens - 1) // tile * tile * (tokens > 0)


def padding_rows(tokens: Any, tile: int) -> Any:
    """Rows that ``tokens`` leave empty in the last of their tiles, behind the first: computed for nothing."""
    return -tokens % tile * (tokens > tile)


_ROWS = (
    Term("step", "steps", lambda s: 1.0, "overhead_s", pieces=_BOTH, required=True),
    Term("prefill_tokens", "tokens", lambda s: s.prefill_tokens + s.drafted, pieces=("mixed",), typical=256, required=True),
    Term("decodes", "sequences", lambda s: s.decodes, "decode_s", pieces=_BOTH, typical=64, required=True),
    Term("chunks", "prompts", lambda s: s.chunks, "chunk_s", required=True),
    Term("weights", "steps", lambda s: 1.0, "weights_s", "memory", overlap_only=True, required=True),
    Term("experts", "tokens", computed, "experts_s", "memory", curve="saturating", required=True),
    Term("context", "KV entries", lambda s: s.decode_context + s.prefill_context, pieces=_BOTH, typical=32768, required=True),
    Term("decode_context", "KV entries", lambda s: s.decode_context, "decode_kv_s", "memory", 1e-3, required=True),
    Term("prefill_context", "KV entries", lambda s: s.prefill_context, "prefill_kv_s", "memory", 1e-3, required=True),
    Term("tokens", "tokens", computed, "token_s", "compute", 1.0, "segments", required=True),
    Term("pairs", "pairs", lambda s: s.decode_context + s.prefill_attention, "pair_s", "compute", 1e-3, required=True),
    Term("prefill_attention", "pairs", lambda s: s.prefill_attention, pieces=("mixed",), typical=262144, required=True),
    Term("prompts", "steps with prompts", lambda s: 1.0 * (s.prefill_tokens > 0), "prompt_s"),
    Term("mixed_context", "KV entries", lambda s: s.decode_context * (s.prefill_tokens > 0), "mixed_kv_s", "outside", 1e-3),
    Term("tiles_128", "rows", lambda s: further_rows(computed(s), 128), "tile128_s", "compute", 1.0, "tiles", former=True),
    Term("tiles_256", "rows", lambda s: further_rows(computed(s), 256), "tile256_s", "compute", 1.0, "tiles", former=True),
    Term("eager", "steps", lambda s: 1.0 * (s.prefill_tokens + s.drafted > 0), "eager_s", unrecorded_only=True),
    Term("padding_128", "rows", lambda s: padding_rows(computed(s), 128), "padding128_s", "compute", 1.0, "tiles"),
    Term("padding_256", "rows", lambda s: padding_rows(computed(s), 256), "padding256_s", "compute", 1.0, "tiles"),
)  # fmt: skip

TERMS: dict[str, Term] = {term.name: term for term in _ROWS}
"""Every term, by name. (query, key) pairs are those of attention, KV entries the tokens whose keys and values are read.

A drafted token is computed as a prompt's token is, and counts as one: in ``tokens``, and in ``prefill_tokens`` for the learner.

What runs for every step (:meth:`StepLearner.predict`, ``CostModel.predict``) has these rows written out, and takes any
further one from the table, more slowly.
"""


def learned_terms(piece: Piece) -> list[Term]:
    """The inputs of a piece of the learner, in order."""
    return [term for term in TERMS.values() if piece in term.pieces]


class StepModel(Protocol):
    """Predicts how long a step takes."""

    def predict(self, step: StepFeatures) -> float: ...


class Knowledge(NamedTuple):
    """What a learner has learned: unit-free coefficients of its two pieces, their covariances, and its unit of time, s."""

    unit_s: float
    decode: Sequence[float]
    decode_covariance: Sequence[Sequence[float]]
    mixed: Sequence[float]
    mixed_covariance: Sequence[Sequence[float]]


class StepLearner:
    """Learns step times online. ``observe`` costs some 20 µs and neither grows nor slows with the number of steps.

    The first ``warm_up`` steps are left out (caches, lazy initialisation). ``graphs``: the steps that are recorded
    (:class:`runtime.tunable.Facts`). ``ready`` says that enough has been seen to predict. Times are learned relative to the
    first ones seen, so hardware of any speed looks alike.
    """

    __slots__ = (
        "_decode",
        "_dummies",
        "_mixed",
        "_more_decode",
        "_more_mixed",
        "_rows",
        "_seen",
        "_unit",
        "_warm_up",
        "error",
        "graphs",
    )

    # The inputs that are written out below; rows of the table behind them are asked one by one.
    _WRITTEN_OUT: ClassVar[dict[Piece, tuple[str, ...]]] = {
        "decode": ("step", "decodes", "context"),
        "mixed": ("step", "prefill_tokens", "decodes", "context", "prefill_attention"),
    }
    _TOKENS, _DECODES, _CONTEXT, _PAIRS = (
        1 / TERMS[name].typical for name in ("prefill_tokens", "decodes", "context", "prefill_attention")
    )

    def __init__(self, *, forgetting: float = 0.98, warm_up: int = 4, graphs: StepGraphs = NO_GRAPHS) -> None:
        decode, mixed = learned_terms("decode"), learned_terms("mixed")
        self._decode = RecursiveLeastSquares(len(decode), forgetting=forgetting)
        self._mixed = RecursiveLeastSquares(len(mixed), forgetting=forgetting)
        self._more_decode = decode[len(self._WRITTEN_OUT["decode"]) :]
        self._more_mixed = mixed[len(self._WRITTEN_OUT["mixed"]) :]
        self._unit = 0.0
        self._seen = 0
        self._warm_up = warm_up
        self.graphs = graphs
        self._rows = graphs.rows_by_decodes()
        self._dummies = [rows - tokens for tokens, rows in enumerate(graphs.rows_by_tokens())]  # of a step with prompts
        self.error = 1.0
        """Running mean of the relative error of predictions made before each step was learned."""

    @classmethod
    def warm_start(cls, known: Knowledge, *, graphs: StepGraphs = NO_GRAPHS) -> StepLearner:
        """A learner that predicts from the start, by what another has learned of this hardware, perhaps long ago.

        A machine 1.8 times slower is followed within a few steps, and what each coefficient is by itself is learned as it shows.
        Of terms that are newer than the knowledge it knows nothing. ``graphs``: of the hardware that is met now. Raises
        ``ValueError`` for what is no knowledge.
        """
        learner = cls(graphs=graphs)
        for piece, least, values, covariance in (
            (learner._decode, len(cls._WRITTEN_OUT["decode"]), known.decode, known.decode_covariance),
            (learner._mixed, len(cls._WRITTEN_OUT["mixed"]), known.mixed, known.mixed_covariance),
        ):
            size, given = len(piece.coefficients), len(values)
            if not least <= given <= size or [len(row) for row in covariance] != [given] * given:
                needed = f"{size} are needed" if least == size else f"{least} to {size} are needed"
                raise ValueError(f"{given} coefficients with {len(covariance)} rows of covariance; {needed}")
            if not all(map(math.isfinite, [*values, *(v for row in covariance for v in row)])) or min(values) < 0:
                raise ValueError(
                    f"coefficients are {values}; they must be numbers of at least 0, as must be their variances"
                )
            if any(values):  # a piece that never saw a step has nothing to tell
                newer = [0.0] * (size - given)
                rows = [[*row, *newer] for row in covariance]
                rows += [[float(i == j) for j in range(size)] for i in range(given, size)]
                piece.set_prior([*values, *newer], rows, _PRIOR_ERROR)
        if not (math.isfinite(known.unit_s) and known.unit_s > 0):
            raise ValueError(f"unit_s is {known.unit_s}; it must be above 0")
        learner._unit = known.unit_s
        learner.error = 0.1
        return learner

    @property
    def knowledge(self) -> Knowledge:
        """What :meth:`warm_start` begins with."""
        decode, mixed = self._decode, self._mixed
        return Knowledge(self._unit, decode.coefficients, decode.covariance(), mixed.coefficients, mixed.covariance())

    @property
    def ready(self) -> bool:
        return self.samples >= 12

    @property
    def knows_prompts(self) -> bool:
        """Whether enough steps with prompts have been seen to say how many tokens of them a step may hold."""
        return self.ready and self._mixed.samples >= 4

    @property
    def samples(self) -> int:
        """Steps learned from."""
        return self._decode.samples + self._mixed.samples

    @property
    def pair_tokens(self) -> float:
        """Prompt tokens, each read once, that take as long as one attention pair of a prompt; 0 if that is not known."""
        if not self._mixed.samples:
            return 0.0
        token = self._mixed.coefficients[1] * self._TOKENS
        return self._mixed.coefficients[4] * self._PAIRS / token if token > 0 else 0.0

    def _decode_inputs(self, step: StepFeatures, *, recorded: bool = True) -> list[float]:
        """``recorded``: where a step of decodes alone is."""
        context, rows = (step.decode_context + step.prefill_context) * self._CONTEXT, step.decodes
        if recorded and rows < len(self._rows) and not (step.prefill_tokens or step.drafted):
            rows = self._rows[rows]
        inputs = [1.0, rows * self._DECODES, context]
        return inputs + self._further(self._more_decode, step, rows) if self._more_decode else inputs

    def _mixed_inputs(self, step: StepFeatures, decode: list[float]) -> list[float]:
        pairs, dummies = step.prefill_attention * self._PAIRS, 0
        tokens, drafted, decodes = step.prefill_tokens, step.drafted, step.decodes
        whole = tokens + decodes
        if whole < len(self._dummies) and tokens and not drafted and decodes + step.chunks <= self.graphs.sequences:
            dummies = self._dummies[whole]
        inputs = [1.0, (tokens + drafted + dummies) * self._TOKENS, decode[1], decode[2], pairs]
        return inputs + self._further(self._more_mixed, step, decodes + dummies) if self._more_mixed else inputs

    @staticmethod
    def _further(terms: Sequence[Term], step: StepFeatures, rows: int) -> list[float]:
        """The inputs that are not written out, of a step with so many decode rows."""
        computed = step._replace(decodes=rows)
        return [float(t.amount(computed if t.padded else step)) / t.typical for t in terms]

    def predict(self, step: StepFeatures) -> float:
        """Seconds; 0 before anything was learned."""
        decode = self._decode_inputs(step)
        if step.prefill_tokens + step.drafted == 0 and self._decode.samples:
            return self._unit * self._decode.predict(decode)
        mixed = self._mixed_inputs(step, decode)
        if not self._decode.samples:
            return self._unit * self._mixed.predict(mixed)
        return self._unit * max(self._decode.predict(decode), self._mixed.predict(mixed))

    def observe(self, step: StepFeatures, seconds: float, predicted: float | None = None) -> None:
        """Learn from a step. A time that is not a positive finite number is ignored.

        ``predicted``: what :meth:`predict` says of it, if the caller has just asked.
        """
        if not 0 < seconds < math.inf:
            return
        self._seen += 1
        if self._seen <= self._warm_up:
            return
        if not self._unit:
            self._unit = seconds
        y = seconds / self._unit
        decode = self._decode_inputs(step)
        if self.ready:
            predicted = self.predict(step) if predicted is None else predicted
            self.error += 0.05 * (min(1.0, abs(predicted / seconds - 1)) - self.error)
        if step.prefill_tokens + step.drafted == 0:
            self._decode.update(decode, y)
            return
        mixed = self._mixed_inputs(step, decode)
        below = self._decode.predict(decode) if self._decode.samples > 3 else 0.0
        above = self._mixed.predict(mixed)
        if self._mixed.samples > 5 and below > above and abs(below - y) < abs(above - y):
            self._decode.update(decode, y)
        else:
            self._mixed.update(mixed, y)

    def rescale(self, factor: float, *, mixed: bool) -> None:
        """Steps take ``factor``, above 0, times as long as they did: those with prompts or drafts (``mixed``), or the others."""
        (self._mixed if mixed else self._decode).rescale(factor)

    def most_prefill(
        self, decodes: int, context: int, seconds: float, in_progress: Iterable[tuple[int, int]] = ()
    ) -> float:
        """The most prompt tokens that a step may hold beside ``decodes`` (reading ``context`` tokens) to take ``seconds``.

        Negative when the decodes alone take longer, inf when prompts cost nothing that has been seen. ``in_progress``: (tokens
        computed, tokens that this step may compute) of prompts that come first; their attention reads what was computed. What
        is left of the time goes to one fresh chunk. Where such a step is recorded, as many as fill a recorded one.
        """
        if not self._unit:
            return math.inf
        if self._more_decode or self._more_mixed:
            return self._searched(decodes, context, seconds, list(in_progress))
        allowed = seconds / self._unit
        if decodes and self._decode.samples:
            d0, d1, d2 = self._decode.coefficients
            over = d0 + d1 * decodes * self._DECODES + d2 * context * self._CONTEXT - allowed
            if over > 0:
                return -over * self._unit
        if not self._mixed.samples:
            return math.inf
        m0, m1, m2, m3, m4 = self._mixed.coefficients
        left = allowed - m0 - m2 * decodes * self._DECODES - m3 * context * self._CONTEXT
        if left <= 0:
            return 0.0
        read, pair = m3 * self._CONTEXT, m4 * self._PAIRS
        linear, square = m1 * self._TOKENS + read, pair / 2
        first, sequences = 0, decodes + 1
        for start, count in in_progress:
            left -= read * start
            each = linear + pair * start
            cost = count * (each + square * count)
            if cost >= left:
                tokens = first + (_positive_root(square, each, left) if left > 0 else 0.0)
                return self._filling(tokens, decodes, sequences)
            left -= cost
            first += count
            sequences += 1
        return self._filling(first + _positive_root(square, linear, left), decodes, sequences)

    def _filling(self, tokens: float, decodes: int, sequences: int) -> float:
        """Of so many prompt ``tokens`` those that fill a recorded step; all where none is recorded that holds them."""
        whole = tokens + decodes + 1e-3  # no step is left out for a rounding error
        if whole >= len(self._dummies) or sequences > self.graphs.sequences:
            return tokens
        sizes = self.graphs.prompts
        at = bisect_right(sizes, whole)
        return float(max(0, sizes[at - 1] - decodes)) if at else 0.0

    def _searched(self, decodes: int, context: int, seconds: float, in_progress: Sequence[tuple[int, int]]) -> float:
        """:meth:`most_prefill` whatever the terms are: no step takes less for holding more, so by halving."""
        if decodes and self._decode.samples:
            inputs = self._decode_inputs(StepFeatures(decodes, context, 0, 0, 0), recorded=False)  # prompts come to it
            alone = self._unit * self._decode.predict(inputs)
            if alone > seconds:
                return seconds - alone
        if (
            not self._mixed.samples
            or self.predict(_with_prompts(decodes, context, _MOST_TOKENS, in_progress)) <= seconds
        ):
            return math.inf
        fits, over = 0, _MOST_TOKENS
        while over - fits > 1:
            middle = (fits + over) // 2
            if self.predict(_with_prompts(decodes, context, middle, in_progress)) <= seconds:
                fits = middle
            else:
                over = middle
        return float(fits)


_MOST_TOKENS = 2**24
"""Prompt tokens that no step holds."""


def _with_prompts(decodes: int, context: int, tokens: int, in_progress: Sequence[tuple[int, int]]) -> StepFeatures:
    """A step with so many prompt tokens: those of ``in_progress`` first, the rest in one fresh chunk."""
    left, read, pairs, chunks = tokens, 0, 0, 0
    for start, most in (*in_progress, (0, tokens)):
        if count := min(most, left):
            left, read, chunks = left - count, read + start + count, chunks + 1
            pairs += count * start + count * (count + 1) // 2
    return StepFeatures(decodes, context, tokens, read, pairs, chunks)


def _positive_root(square: float, linear: float, value: float) -> float:
    """The n at which ``square·n² + linear·n`` is ``value`` > 0; inf if it never is."""
    if square > 0:
        return (math.sqrt(linear * linear + 4 * square * value) - linear) / (2 * square)
    return value / linear if linear > 0 else math.inf
