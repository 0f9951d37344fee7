"""What a step is to do (StepPlan) and what it did (StepResult): plain data, no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from runtime.records import FinishReason, LimitedBy
from runtime.request import Sequence
from runtime.shared.ceilings import StepLoad


class Chunk(NamedTuple):
    """``count`` tokens of ``sequence`` from position ``start`` on. ``samples``: its last token yields a new one.

    ``drafted``: of a decoding sequence, the token ids guessed to follow its last token, which is the chunk's first. Each of its
    tokens is sampled then, and what is sampled counts as far as the guesses are right, and one token beyond.
    """

    sequence: Sequence
    start: int
    count: int  # type: ignore[assignment]  # this chunk's tokens; tuple.count is of no use here
    samples: bool
    drafted: tuple[int, ...] = ()


class DecodeSet:
    """The sequences that decode, in the order they joined. A plan holds this and the version it saw."""

    __slots__ = ("_at", "_rows", "members", "version")

    def __init__(self) -> None:
        self.members: dict[Sequence, None] = {}
        self.version = 0
        self._rows: tuple[Sequence, ...] = ()
        self._at = 0

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.members)

    def rows(self, version: int) -> tuple[Sequence, ...]:
        """The members at ``version``. Rebuilt only when membership changed; a stale version raises RuntimeError."""
        if version != self.version:
            raise RuntimeError(f"stale plan: made at version {version} of the decode set, which is now {self.version}")
        if self._at != version:
            self._rows, self._at = tuple(self.members), version
        return self._rows


class StepPlan(NamedTuple):
    """One step. Decode rows come first (one token each), then ``drafts``, then prompt chunks.

    ``step`` is the scheduler's decode index g: a decoding sequence s has computed ``s.computed + step − s.joined`` tokens,
    and this step computes the next one. ``decode_context`` is the sum over decodes of the context they read, their new token
    included. ``repeat`` > 1 (simulation only): that many identical decode steps may be run in one go. An empty plan with a
    finite ``wake_at`` means: nothing before then, unless something arrives. ``drafts``: decoding sequences with drafted tokens,
    each a chunk of its own; they are not among the decode rows of this step.
    """

    step: int
    n_decode: int
    decode_context: int
    chunks: tuple[Chunk, ...]
    decodes: DecodeSet
    version: int
    repeat: int
    wake_at: float
    epoch: int
    budget_used: int
    limited_by: LimitedBy
    preemptions: int
    drafts: tuple[Chunk, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.n_decode and not self.chunks and not self.drafts

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    def decode_rows(self) -> tuple[Sequence, ...]:
        return self.decodes.rows(self.version)


class Token(NamedTuple):
    """One sampled token. ``logprob`` and ``top`` (token id, log-probability pairs) only when requested."""

    sequence: Sequence
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class StepResult(NamedTuple):
    """What the executor did. ``ends``: end time of each of the 1…repeat steps. ``tokens``: what was sampled (live only).

    ``stopped``: sequences that end with this step for a reason other than max_tokens. ``failed``: sequences whose
    computation failed, with the cause; they yielded no token. ``oom``: the step, and the parts of it, that ran out of memory,
    but for those with a sequence that does not fit even alone; ``fitted``: the parts that did fit. They lower the engine's
    effective limits. ``accepted``: for sequences with drafted tokens, how many of those were right, so that the sequence yields
    as many tokens and one more; none where it is not named. ``computed_at``: when the last step was done on its device, where
    that is known better than by when the host had its tokens, the end.
    """

    ends: Seq[float]
    tokens: Seq[Token] = ()
    stopped: Seq[tuple[Sequence, FinishReason]] = ()
    failed: Seq[tuple[Sequence, BaseException]] = ()
    oom: Seq[StepLoad] = ()
    fitted: Seq[StepLoad] = ()
    accepted: Seq[tuple[Sequence, int]] = ()
    computed_at: float | None = None


class Executor(Protocol):
    """Runs plans. ``until`` bounds a repeated plan (next arrival or control tick); a live executor does one step.

    It contains what goes wrong with a request. :class:`runtime.errors.DeviceError`, which it alone can tell, closes the
    engine; anything else that it raises fails the requests of the step. Only one whose attribute ``verifies_drafts`` is True is
    given plans with drafts.
    """

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult: ...

    def release(self, sequence: Sequence) -> None:
        """Forget what is kept for ``sequence``: it has ended."""
        ...


class OverlappingExecutor(Executor, Protocol):
    """An executor that can be given a step while it has another: ``launch``, ``launch``, then ``collect`` and ``launch`` in turn.

    A row whose last token has not been collected is fed what the step before sampled.
    """

    @property
    def overlaps(self) -> bool:
        """Whether that is worth while. A fact of the start."""
        ...

    @property
    def in_trouble(self) -> bool:
        """Whether a step in flight has failed as a whole, and no other may be launched before it is collected."""
        ...

    def needs_tokens(self, plan: StepPlan) -> bool:
        """Whether ``plan`` may be launched only when the tokens of the step in flight are in the sequences' ``output``."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Queue ``plan`` without waiting for anything."""
        ...

    def collect(self) -> StepResult:
        """Wait for the step launched first, and tell what it did."""
        ...
