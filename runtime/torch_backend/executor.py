"""Runs step plans on a transformers model: inputs, one packed forward, sampling; and contains what goes wrong in a step."""

from __future__ import annotations

import inspect
import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runtime.clock import Clock, MonotonicClock
from runtime.llm.drafts import verified
from runtime.llm.plan import Chunk, StepPlan, StepResult, Token
from runtime.request import Sequence
from runtime.shared.ceilings import StepLoad
from runtime.step_model import StepGraphs
from runtime.torch_backend.attention import FixedAttention, FixedSteps, PackedModel, StepInputs
from runtime.torch_backend.backends import Backend, backend_for, check_kv_cache_dtype
from runtime.torch_backend.contract import Loaded
from runtime.torch_backend.current_device import made_current, on_its_device
from runtime.torch_backend.faults import device_error
from runtime.torch_backend.fused_layer import fuse_layers, prunes
from runtime.torch_backend.inputs import DecodeRows, Ints, Listed, PackedBatch, chunk_slots, chunk_tokens, listed
from runtime.torch_backend.kv_pool import KVPool
from runtime.torch_backend.memory import is_out_of_memory
from runtime.torch_backend.norm import fuse_norms
from runtime.torch_backend.recorded_steps import RecordedSteps
from runtime.torch_backend.resident import Graphs, InFlight, ResidentDecode, ResidentRows
from runtime.torch_backend.sampling import Drawn, FixedSampler
from runtime.torch_backend.soundness import sound_chunks, unsound
from runtime.torch_backend.straight import StraightModel, straight
from runtime.torch_backend.transfer import DeviceEnds, Readback, to_device

log = logging.getLogger(__name__)

Work = Sequence | Chunk

_RECORDED_SEQUENCES: Final = 256
"""Of a recorded step with prompts, at most. Attention has a program for each that there might be, and the last layer a row."""

_TIDY_S: Final = 30.0
"""Between two calls of the backend's ``tidy``."""


@dataclass(slots=True)
class Timers:
    """CPU seconds of the process (all its threads) since the executor was made, by stage, and the steps they cover."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    steps: int = 0


@dataclass(slots=True)
class _Outcome:
    """What a step yields while it is put together, perhaps from several attempts."""

    tokens: list[Token] = field(default_factory=list)
    failed: list[tuple[Sequence, BaseException]] = field(default_factory=list)
    accepted: list[tuple[Sequence, int]] = field(default_factory=list)
    oom: list[list[Work]] = field(default_factory=list)  # parts that ran out of memory, and those that ran
    fitted: list[list[Work]] = field(default_factory=list)

    def loads(self) -> tuple[list[StepLoad], list[StepLoad]]:
        """What ran out of memory and what fitted; a sequence that does not fit even alone says nothing of the others."""
        alone = {sequence for sequence, error in self.failed if is_out_of_memory(error)}
        blamed = self.oom
        if self.fitted:
            blamed = [part for part in self.oom if alone.isdisjoint(map(_owner, part))]
        return [_load(part) for part in blamed], [_load(part) for part in self.fitted]


class _Prepared(NamedTuple):
    """Inputs of a forward: ids and positions ``[2, tokens]``, the rows whose logits are wanted (None: all), and who samples,
    each so many tokens (``behind``) behind those the host knows."""

    tokens: Tensor
    wanted: Tensor | None
    step: StepInputs
    sampling: list[Sequence]
    behind: list[int]
    listed: Listed | None = None  # of a step whose forward is recorded


class _Begun(NamedTuple):
    """What a forward leaves on the device for the host to read."""

    drawn: Drawn
    chunks: list[Chunk]  # whose soundness is told
    values: Readback
    drafts: Seq[Chunk] = ()


class _Read(NamedTuple):
    """The tokens sampled, who failed, how many drafted tokens of whom were right, and who is to be run again without drafts.
    ``ended``: when the device was done."""

    tokens: list[Token]
    failed: list[tuple[Sequence, BaseException]]
    accepted: list[tuple[Sequence, int]]
    again: list[Chunk]
    ended: float


class _Launched(NamedTuple):
    """A step between launch and collect: either what it ``begun``, or the ``cause`` why that was not possible. ``blocks``: those
    of each row and chunk as it was launched. ``spoiled``: it was fed by a step that failed, or reads what that left in blocks, so
    what it computed is worth nothing."""

    work: tuple[tuple[Sequence, ...], tuple[Chunk, ...]]
    step: int
    begun: _Begun | None
    cause: Exception | None
    blocks: list[list[int]]
    spoiled: bool = False

    @property
    def sequences(self) -> list[Sequence]:
        rows, chunks = self.work
        return [*rows, *(chunk.sequence for chunk in chunks)]

    def blocks_of(self, sequence: Sequence) -> list[int]:
        return self.blocks[self.sequences.index(sequence)]

    def uses(self, blocks: Seq[int]) -> bool:
        """Whether somebody who is still there has one of ``blocks``."""
        held = zip(self.sequences, self.blocks, strict=True)
        return any(not set(blocks).isdisjoint(own) for sequence, own in held if sequence.state != "finished")

    def without(self, sequence: Sequence) -> _Launched:
        """The same with no blocks for ``sequence``."""
        held = zip(self.sequences, self.blocks, strict=True)
        return self._replace(blocks=[[] if other is sequence else own for other, own in held])


def _owner(work: Work) -> Sequence:
    return work.sequence if isinstance(work, Chunk) else work


def _load(part: list[Work]) -> StepLoad:
    chunks = [work for work in part if isinstance(work, Chunk)]
    tokens = len(part) - len(chunks) + sum(chunk.count for chunk in chunks)
    return StepLoad(len(part), tokens, max((chunk.count for chunk in chunks if not chunk.drafted), default=0))


class TorchExecutor:
    """An :class:`runtime.llm.plan.Executor` over ``loaded`` with a pool of ``kv_blocks`` blocks of ``block_size`` tokens, which
    is allocated here; ``ValueError`` if it does not fit.

    One thread at a time. A step is :meth:`launch`, which queues its work on the device, and :meth:`collect`, which reads what
    came out. One that raises in either is split in halves and run again, down to the request at fault; one that runs out of
    memory likewise, and a chunk that does not fit alone is run in halves too. Logits that are not finite fail their own row only;
    of a sequence with drafts, those that are reached without them.
    A device that is lost raises DeviceError.

    Steps may overlap one deep: with ``overlaps``, the next step may be launched before the last one is collected. Rows take the
    token that the host has not read from where it was sampled. If the last one then fails, the next is run again as well.

    Steps of decode rows alone are recorded, if the backend can record and ``max_batch_size`` says for how many rows:
    ``graphs.decodes``. What cannot be recorded, rows with a repetition penalty or log-probabilities, and steps that verify drafts
    run as they do elsewhere. The forward of steps with prompts of up to ``token_budget`` tokens is recorded, too, for some
    numbers of them: ``graphs.prompts``; where it is None, it is not.

    Norms and decoder layers of the model are fused where that computes the same. What else of a step depends on the device is
    ``backend``'s; None takes the one for the device of the model.
    """

    verifies_drafts = True

    def __init__(
        self,
        loaded: Loaded,
        *,
        kv_blocks: int,
        block_size: int = 16,
        seed: int = 0,
        clock: Clock | None = None,
        backend: Backend | None = None,
        max_batch_size: int | None = None,
        token_budget: int | None = None,
        overlaps: bool | None = None,
    ) -> None:
        self.loaded = loaded
        self.device = loaded.device
        with made_current(self.device):
            backend = backend or backend_for(loaded.device)
            recorded = max_batch_size is not None and backend.record is not None
            scratch = recorded or backend.padded is not None
            check_kv_cache_dtype(loaded.kv_cache_dtype, loaded.device, backend)
            fp8 = loaded.kv_cache_dtype == "fp8"
            self.pool = KVPool(kv_blocks, block_size, loaded.kv_layers, loaded.device, scratch=scratch, fp8=fp8)
            self.overlaps = backend.overlaps if overlaps is None else overlaps
            """Whether a step may be launched while another is in flight, and gains by it."""
            self.sampler = backend.sampler(loaded.vocab_size, loaded.device, seed)
            self.timers, self.hook_calls = Timers(), 0  # calls of our attention in the last forward
            self._clock = clock or MonotonicClock()
            self._ends = DeviceEnds(self._clock)
            self._tidy, self._tidy_at = backend.tidy, self._clock.now() + _TIDY_S
            self._model = PackedModel(loaded.model)
            self._keeps_logits = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters
            self._rows = DecodeRows(block_size, self.pool.pad_block)
            fuse_norms(loaded.model)
            fuse_layers(loaded.model, backend.operations, loaded.max_model_len)
            laid_out = backend.lay_out(loaded.model)
            self._padded = backend.padded if laid_out else None
            self._operations = backend.operations
            self.attention = backend.attention(self.pool, loaded)
            self._prunes = self._keeps_logits and prunes(loaded.model)
            self._chain: StraightModel | None = straight(loaded.model, loaded.max_model_len)
            parts = tuple(loaded.model.modules())
            self._hooks: list[Any] = [hooks for m in parts for hooks in (m._forward_hooks, m._forward_pre_hooks)]
            self._serial = 0
            self._tainted: set[int] = set()  # blocks that may hold values that are not finite
            self._launched: deque[_Launched] = deque()
            # of a decode set at a version: whether a row needs its tokens
            self._penalised: tuple[object, int, bool] = (None, -1, False)
            self._resident = self._record(backend, max_batch_size) if max_batch_size is not None else None
            self._steps: RecordedSteps | None = None
            if token_budget is not None and max_batch_size is not None and self._resident is not None:
                self._steps = self._record_steps(backend, token_budget, max_batch_size)

    @property
    def graphs(self) -> StepGraphs:
        """The steps that are recorded."""
        decodes = () if self._resident is None else self._resident.sizes
        if self._steps is None:
            return StepGraphs(decodes)
        return StepGraphs(decodes, self._steps.sizes, self._steps.sequences)

    @property
    def in_trouble(self) -> bool:
        """Whether a step in flight is to be run again in parts: none may be launched before it is collected."""
        return any(launched.cause is not None or launched.spoiled for launched in self._launched)

    def needs_tokens(self, plan: StepPlan) -> bool:
        """Whether ``plan`` can only be launched when the host has read the tokens of all steps before: a repetition penalty lists
        them."""
        decodes, version, found = self._penalised
        if decodes is not plan.decodes or version != plan.version:
            found = any(s.request.params.repetition_penalty != 1 for s in plan.decode_rows())
            self._penalised = (plan.decodes, plan.version, found)
        return found

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        """Compute ``plan`` once (``repeat`` is for simulations) and sample."""
        self.launch(plan)
        return self.collect()

    @on_its_device
    def launch(self, plan: StepPlan) -> None:
        """Queue the forward of ``plan`` and its sampling on the device, without waiting for it. :meth:`collect` tells what went
        wrong here, too; it comes next, or after one more launch if steps overlap."""
        if len(self._launched) > self.overlaps:
            raise RuntimeError("a step was launched before the last one was collected")
        begun: _Begun | None = None
        cause: Exception | None = None
        rows, chunks = plan.decode_rows(), (*plan.drafts, *plan.chunks)
        before = self._launched[-1].begun if self._launched else None
        if not plan.empty:
            try:
                with torch.inference_mode():
                    flight = None
                    if before is not None and before.drawn.tensors:
                        flight = InFlight(before.drawn.sequences, before.drawn.tensors[0])
                    if self._resident is not None and self._resident.fits(plan) and self._plain_model:
                        begun = self._begin_recorded(self._resident, plan, flight)
                    else:
                        self._rows.advance(plan)
                        begun = self._begin(PackedBatch(self._rows, chunks), flight)
            except Exception as error:
                cause = error
        blocks = [sequence.blocks for sequence in rows] + [chunk.sequence.blocks for chunk in chunks]
        self._launched.append(_Launched((rows, chunks), plan.step, begun, cause, blocks))

    @on_its_device
    def collect(self) -> StepResult:
        """What the step launched first yields; waits for the device, but not for a step launched since."""
        if not self._launched:
            raise RuntimeError("no step was launched")
        launched = self._launched.popleft()
        (rows, chunks), step, begun, cause, _, spoiled = launched
        outcome, read = _Outcome(), None
        if begun is not None:
            try:
                read = self._read(begun)
            except Exception as error:
                cause = error
            begun = None
        if cause is not None or spoiled:  # out of the except block, so that the frames that raised can be freed
            self._forget()
            self._ends.forget()
            read = None
            self._launched = deque(later._replace(begun=None, spoiled=True) for later in self._launched)
            work: list[Work] = [*rows, *chunks]
            work = [w for w in work if _owner(w).state != "finished"]  # whose blocks may be others'
            if spoiled and work:
                self._attempt(work, step, outcome)
            elif cause is not None and work:
                self._divide(work, step, cause, outcome)
        elif read is not None:
            self._take(read, step, outcome)
        if rows or chunks:
            for sequence, _ in outcome.failed:
                self._taint(sequence, launched.blocks_of(sequence))
                self._rows.forget()  # its row may hold them too, behind the tokens of whoever gets it
            self.timers.steps += 1
        result = StepResult((self._clock.now(),), outcome.tokens, failed=outcome.failed, accepted=outcome.accepted)
        if read is not None and not read.again:
            result = result._replace(computed_at=read.ended)
        if outcome.oom:
            oom, fitted = outcome.loads()
            result = result._replace(oom=oom, fitted=fitted)
        if self._tidy is not None and result.ends[-1] >= self._tidy_at:
            self._tidy()
            self._tidy_at = self._clock.now() + _TIDY_S
        return result

    def release(self, sequence: Sequence) -> None:
        """Forget ``sequence``."""
        sequence.data = None

    @on_its_device
    def logits(self, plan: StepPlan) -> tuple[Tensor, list[Sequence]]:
        """Compute ``plan`` and return logits ``[rows that sample, vocab]`` and whose they are, instead of sampling.

        A sequence with drafted tokens has a row for its last token and one for each of those. Errors propagate.
        """
        try:
            with torch.inference_mode():
                self._rows.advance(plan)
                chunks = (*plan.drafts, *plan.chunks)
                prepared = self._prepare(PackedBatch(self._rows, chunks))
                return self._forward(prepared), prepared.sampling
        except Exception:
            self._rows.forget()
            raise

    def _forget(self) -> None:
        """What is kept of the rows from step to step misses what the parts of a failed step write."""
        self._rows.forget()
        if self._resident is not None:
            self._resident.rows.forget()

    def _record(self, backend: Backend, most: int) -> ResidentDecode | None:
        """Decode steps of up to ``most`` rows, recorded; None where that is not possible."""
        attention, sampler, record = self.attention, self.sampler, backend.record
        scratch = self.pool.scratch_block
        if record is None or scratch is None:
            return None
        if not isinstance(attention, FixedAttention) or not isinstance(sampler, FixedSampler):
            return None
        size = self.pool.block_size
        rows = ResidentRows(
            most,
            min(self.pool.block_count, -(-self.loaded.max_model_len // size)),
            block_size=size,
            pad_block=self.pool.pad_block,
            scratch_block=scratch,
            sampler=sampler,
            device=self.device,
        )

        def recorded(step: Callable[[int], None]) -> Graphs:
            return record(backend.ladder(most), step, self.device)

        try:
            return ResidentDecode(rows, self._forward_fixed, attention=attention, sampler=sampler, record=recorded)
        except Exception as error:  # whatever a model raises that waits for the device, or has no memory left
            if (lost := device_error(error, self.device)) is not None:
                raise lost from error
            log.warning("decode steps of %s are not recorded and cost more of the host: %s", self.loaded.name, error)
            return None

    def _record_steps(self, backend: Backend, most: int, sequences: int) -> RecordedSteps | None:
        """Forwards of steps of up to ``most`` tokens of up to ``sequences`` sequences; None where that is not possible."""
        attention, record, scratch, chain = self.attention, backend.record, self.pool.scratch_block, self._chain
        if record is None or scratch is None or chain is None or not isinstance(attention, FixedSteps):
            return None
        sizes = backend.prompt_ladder(most, chain.parameters)
        if not sizes:
            return None
        size = self.pool.block_size
        width = min(self.pool.block_count, -(-self.loaded.max_model_len // size))
        sequences = min(sequences, _RECORDED_SEQUENCES)
        try:
            return RecordedSteps(
                sizes, sequences, width, block_size=size, pad_block=self.pool.pad_block, scratch_slot=scratch * size,
                forward=self._forward_step, attention=attention, record=lambda step: record(sizes, step, self.device),
                device=self.device,
            )  # fmt: skip
        except Exception as error:  # as for decode steps
            if (lost := device_error(error, self.device)) is not None:
                raise lost from error
            log.warning("steps with prompts of %s are not recorded: %s", self.loaded.name, error)
            return None

    def _forward_step(self, ids: Tensor, positions: Tensor, slots: Tensor, wanted: Tensor, state: Any) -> Tensor:
        """What the head reads ``[wanted, width]`` of ``ids`` at ``positions`` and ``slots [tokens]``."""
        assert self._chain is not None
        self._serial += 1
        step = StepInputs(self._serial, self.pool, slots, self._operations, self.attention, state)
        if self._prunes:
            step.wanted = wanted  # the last layer leaves out the others
        with self._model.running(step):
            found = self._chain.hidden(ids, positions, step, None if self._prunes else wanted)
        self.hook_calls = step.calls
        return found

    @property
    def _plain_model(self) -> bool:
        """Whether the model is still what was recorded: nobody has hooked into it, or into a part of it."""
        return (self._chain is None or self._chain.applies) and not any(self._hooks)

    def _forward_fixed(self, ids: Tensor, positions: Tensor, slots: Tensor, state: Any) -> Tensor:
        """Logits ``[rows, vocab]`` of ``ids`` at ``positions`` and ``slots [rows]``."""
        self._serial += 1
        step = StepInputs(self._serial, self.pool, slots, self._operations, self.attention, state)
        return self._logits(ids, positions, step, None)

    def _begin_recorded(self, resident: ResidentDecode, plan: StepPlan, flight: InFlight | None) -> _Begun:
        """As :meth:`_begin`, by one call."""
        timers, started = self.timers, time.process_time()
        if self._tainted:
            self._scrub(resident.rows.sequences, resident.rows.positions_at(plan.step), ())
        sequences, ids = resident.launch(plan, flight)
        drawn = Drawn(sequences, [ids], ())
        values = Readback(drawn.tensors)
        timers.forward_s += time.process_time() - started
        return _Begun(drawn, [], values)

    def _begin(self, batch: PackedBatch, flight: InFlight | None = None) -> _Begun:
        """Everything of ``batch`` that the device does. Tokens that the host does not know come from ``flight``."""
        timers, started = self.timers, time.process_time()
        prepared = self._prepare(batch, flight)
        ready = time.process_time()
        logits = self._forward(prepared)
        computed = time.process_time()
        drafts = [chunk for chunk in batch.chunks if chunk.drafted]
        if flight is not None:
            drawn = self.sampler.draw(logits, prepared.sampling, flight.rows)
        elif drafts:
            drawn = self.sampler.draw(logits, prepared.sampling, behind=prepared.behind)
        else:
            drawn = self.sampler.draw(logits, prepared.sampling)
        chunks, sound = sound_chunks(batch, prepared.step)
        values = Readback(drawn.tensors if sound is None else [*drawn.tensors, sound])
        timers.prepare_s += ready - started
        timers.forward_s += computed - ready
        timers.sample_s += time.process_time() - computed
        return _Begun(drawn, chunks, values, drafts)

    def _read(self, begun: _Begun) -> _Read:
        """What ``begun`` yields; waits for it."""
        started = time.process_time()
        here, ended = self._ends.read(begun.values)
        tokens: list[Token] = []
        accepted: list[tuple[Sequence, int]] = []
        again: list[Chunk] = []
        failed = unsound(begun.chunks, here.pop().tolist()) if begun.chunks else []
        drafts = {draft.sequence: draft for draft in begun.drafts}
        rows = iter(zip(begun.drawn.sequences, begun.drawn.tokens(here), strict=True))
        for sequence, sampled in rows:
            if (draft := drafts.get(sequence)) is not None:
                run = [sampled, *(further for _, further in islice(rows, len(draft.drafted)))]
                right = verified(draft.drafted, run)
                if not all(isinstance(token, Token) for token in run):
                    kept = 1 + right if isinstance(right, int) else 1
                    slots = chunk_slots(draft, self.pool.block_size)[kept:]
                    with torch.inference_mode():  # they are behind its end, and what is masked there must be finite
                        self.pool.scrub_slots(slots)
                    self._forget()
                if isinstance(right, int):
                    tokens += [token for token in run[: right + 1] if isinstance(token, Token)]
                    accepted.append((sequence, right))
                else:  # what attention masked of its drafts may be all that is wrong
                    again.append(Chunk(sequence, draft.start, 1, True))
            elif isinstance(sampled, Token):
                tokens.append(sampled)
            else:
                failed.append((sequence, sampled))
        self.timers.sample_s += time.process_time() - started
        return _Read(tokens, failed, accepted, again, ended)

    def _take(self, read: _Read, step: int, outcome: _Outcome) -> None:
        """Add what was ``read`` of a step, or of a part of it, to ``outcome``; run again what has to be."""
        outcome.tokens += read.tokens
        outcome.failed += read.failed
        outcome.accepted += read.accepted
        if read.again:
            self._attempt([*read.again], step, outcome)

    def _prepare(self, batch: PackedBatch, flight: InFlight | None = None) -> _Prepared:
        whole: Listed | None = None
        if self._steps is not None and self._plain_model and self._steps.fits(batch):
            whole, state = listed(batch, self.pool.block_size, self.pool.pad_block), None
        else:
            state = self.attention.plan(batch)
        rows, size = batch.rows, self.pool.block_size
        positions = rows.positions
        slots = rows.slots(positions)
        flying: dict[Sequence, int] = {} if flight is None else flight.rows
        fed = [row for row, s in enumerate(rows.sequences) if s in flying] if flying else []
        # one without output has failed at its first token
        ids = [s.output[-1] if s.output and s not in flying else 0 for s in rows.sequences]
        sampling, at = list(rows.sequences), len(ids)
        behind = [0] * at
        all_positions, all_slots = [positions], [slots]
        keep = list(range(at))
        for chunk in batch.chunks:
            ids += chunk_tokens(chunk)
            all_positions.append(np.arange(chunk.start, chunk.start + chunk.count))
            all_slots.append(chunk_slots(chunk, size))
            at += chunk.count
            if chunk.drafted:
                keep += range(at - chunk.count, at)
                sampling += [chunk.sequence] * chunk.count
                behind += range(chunk.count)
            elif chunk.samples:
                keep.append(at - 1)
                sampling.append(chunk.sequence)
                behind.append(0)
        if self._tainted:
            self._scrub(rows.sequences, positions, batch.chunks)
        if batch.chunks:
            positions, slots = np.concatenate(all_positions), np.concatenate(all_slots)
        # one row at least goes through the head: some models take no less
        keep = [] if len(keep) == at else keep or [0]
        if self._padded is not None and self._chain is not None and self._plain_model:
            dummies = self._padded(at) - at
            ids += [0] * dummies
            positions = np.concatenate([positions, np.zeros(dummies, np.int64)])
            slots = np.concatenate([slots, self.pool.dummy_slots(dummies)])
            keep += [0] * (self._padded(len(keep)) - len(keep))
        arrays = [np.stack([np.array(ids, np.int64), positions]), slots]
        if keep:
            arrays.append(np.array(keep, np.int64))
        if fed:
            arrays += [np.array(fed, np.int64), np.array([flying[rows.sequences[row]] for row in fed], np.int64)]
        tokens, places, *wanted = to_device(arrays, self.device)
        if fed and flight is not None:
            source, to = wanted.pop(), wanted.pop()
            tokens[0].index_copy_(0, to, flight.take(source))
        self._serial += 1
        step = StepInputs(self._serial, self.pool, places, self._operations, self.attention, state)
        return _Prepared(tokens, wanted[0] if wanted else None, step, sampling, behind, whole)

    def _taint(self, failed: Sequence, blocks: list[int]) -> None:
        """Have ``blocks``, which ``failed`` had, scrubbed before others fill them."""
        self._tainted.update(blocks)
        if failed.state != "finished":  # it may be in the step that is in flight, for nothing, and fail once more
            self._launched = deque(later.without(failed) for later in self._launched)
            return
        # it had ended before this was known, and others may have its blocks already: scrub, then run their step again
        self._launched = deque(
            later._replace(begun=None, spoiled=True) if later.uses(blocks) else later for later in self._launched
        )

    def _scrub(self, sequences: Seq[Sequence], positions: Ints, chunks: Seq[Chunk]) -> None:
        """Zero the tainted blocks whose first slot this step writes: they have a new owner, who will not fill them at once."""
        size = self.pool.block_size
        rows = zip(sequences, positions.tolist(), strict=True)
        fresh = [s.blocks[p // size] for s, p in rows if p % size == 0]
        for chunk in chunks:
            end = chunk.start + chunk.count
            fresh += chunk.sequence.blocks[-(-chunk.start // size) : -(-end // size)]
        found = self._tainted.intersection(fresh)
        if found:
            self.pool.scrub(sorted(found))
            self._tainted -= found

    def _forward(self, prepared: _Prepared) -> Tensor:
        """Logits of the rows that sample."""
        if prepared.listed is not None and self._steps is not None and self._chain is not None:
            found = self._steps.run(prepared.listed, prepared.tokens, prepared.step.slots, prepared.wanted)
            return self._chain.logits(found)[: len(prepared.sampling)]
        ids, positions = prepared.tokens[0], prepared.tokens[1]
        return self._logits(ids, positions, prepared.step, prepared.wanted)[: len(prepared.sampling)]

    def _logits(self, ids: Tensor, positions: Tensor, step: StepInputs, wanted: Tensor | None) -> Tensor:
        """Logits of the rows that are ``wanted`` (None: all) of ``ids`` at ``positions [tokens]``."""
        chain = self._chain if self._chain is not None and self._chain.applies else None
        if self._prunes and (chain is not None or self._chain is None):
            step.wanted, wanted = wanted, None  # the last layer leaves out the others
        with self._model.running(step):
            if chain is not None:
                logits = chain(ids, positions, step, wanted)
            else:
                extra = {"logits_to_keep": wanted} if wanted is not None and self._keeps_logits else {}
                out = self.loaded.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **extra)
                logits = out.logits[0] if self._keeps_logits or wanted is None else out.logits[0][wanted]
        self.hook_calls = step.calls
        return logits

    def _divide(self, work: list[Work], step: int, error: Exception, outcome: _Outcome) -> None:
        """``work`` failed as a whole with ``error``: run it in parts. Raises DeviceError if the device is lost."""
        if (lost := device_error(error, self.device)) is not None:
            raise lost from error
        if is_out_of_memory(error):
            outcome.oom.append(work)
            error = error.with_traceback(None)  # whose frames hold on to the tensors that did not fit
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if len(work) > 1:
            half = len(work) // 2
            for part in (work[:half], work[half:]):
                self._attempt(part, step, outcome)
            return
        only = work[0]
        if isinstance(only, Chunk) and only.drafted and is_out_of_memory(error):
            self._attempt([Chunk(only.sequence, only.start, 1, True)], step, outcome)
            return
        if isinstance(only, Chunk) and only.count > 1 and is_out_of_memory(error):
            half = only.count // 2
            failures = len(outcome.failed)
            self._attempt([Chunk(only.sequence, only.start, half, False)], step, outcome)
            if len(outcome.failed) == failures:
                rest = Chunk(only.sequence, only.start + half, only.count - half, only.samples)
                self._attempt([rest], step, outcome)
            return
        outcome.failed.append((_owner(only), error))

    def _attempt(self, work: list[Work], step: int, outcome: _Outcome) -> None:
        rows = [w for w in work if isinstance(w, Sequence)]
        chunks = [w for w in work if isinstance(w, Chunk)]
        try:
            with torch.inference_mode():
                alone = DecodeRows.alone(self.pool.block_size, self.pool.pad_block, rows, step)
                read = self._read(self._begin(PackedBatch(alone, chunks)))
        except Exception as error:
            cause = error
        else:
            outcome.fitted.append(work)
            self._take(read, step, outcome)
            return
        self._divide(work, step, cause, outcome)
