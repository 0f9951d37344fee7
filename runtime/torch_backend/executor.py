"""Runs step plans on a transformers model: inputs, one packed forward, sampling; and contains what goes wrong in a step."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from runtime.ceilings import Load
from runtime.clock import Clock, MonotonicClock
from runtime.llm.plan import Chunk, StepPlan, StepResult, Token
from runtime.request import Sequence
from runtime.torch_backend.attention import ChunkInputs, DecodeInputs, PackedModel, PaddedDecode, StepInputs
from runtime.torch_backend.contract import Loaded
from runtime.torch_backend.decode_cache import DecodeCache
from runtime.torch_backend.faults import device_error
from runtime.torch_backend.fused_layer import fuse_layers, prunes
from runtime.torch_backend.inputs import DecodeRows, Ints, chunk_slots, chunk_tokens, to_device
from runtime.torch_backend.kv_pool import KVPool
from runtime.torch_backend.linear import pack_linears
from runtime.torch_backend.memory import is_out_of_memory
from runtime.torch_backend.norm import fuse_norms
from runtime.torch_backend.sampling import Sampler
from runtime.torch_backend.soundness import unsound_chunks
from runtime.torch_backend.straight import StraightModel, straight

Work = Sequence | Chunk
MIN_CACHE_BYTES = 64 << 20


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
    oom: list[list[Work]] = field(default_factory=list)  # parts that ran out of memory, and those that ran
    fitted: list[list[Work]] = field(default_factory=list)

    def loads(self) -> tuple[list[Load], list[Load]]:
        """What ran out of memory and what fitted; a sequence that does not fit even alone says nothing of the others."""
        alone = {sequence for sequence, error in self.failed if is_out_of_memory(error)}
        blamed = self.oom
        if self.fitted:
            blamed = [part for part in self.oom if alone.isdisjoint(map(_owner, part))]
        return [_load(part) for part in blamed], [_load(part) for part in self.fitted]


def _owner(work: Work) -> Sequence:
    return work.sequence if isinstance(work, Chunk) else work


def _load(part: list[Work]) -> Load:
    chunks = [work.count for work in part if isinstance(work, Chunk)]
    return Load(len(part), len(part) - len(chunks) + sum(chunks), max(chunks, default=0))


class TorchExecutor:
    """An :class:`runtime.llm.plan.Executor` over ``loaded`` with a pool of ``kv_blocks`` blocks of ``block_size`` tokens, which
    is allocated here; ``ValueError`` if it does not fit.

    One thread at a time. A step that raises is split in halves and run again, down to the request at fault; one that runs
    out of memory likewise, and a chunk that does not fit alone is run in halves too. Logits that are not finite fail their
    own row only. A device that is lost raises DeviceError.

    On a CPU, ``cpu_fast_path`` repacks the model's linear layers and keeps a contiguous copy of the decoding sequences' keys
    and values, which takes up to as much memory as the pool; without it the device-independent code runs.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        kv_blocks: int,
        block_size: int = 16,
        seed: int = 0,
        clock: Clock | None = None,
        cpu_fast_path: bool = True,
    ) -> None:
        self.loaded = loaded
        self.device = loaded.device
        self.pool = KVPool(kv_blocks, block_size, loaded.kv_layers, loaded.device)
        self.sampler = Sampler(loaded.vocab_size, loaded.device, seed)
        self.timers, self.hook_calls = Timers(), 0  # calls of the attention hook in the last forward
        self._clock = clock or MonotonicClock()
        self._model = PackedModel(loaded.model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters
        self._rows = DecodeRows(block_size, self.pool.pad_block)
        self._cache: DecodeCache | None = None
        if self.device.type == "cpu" and cpu_fast_path:
            fuse_norms(loaded.model)
            fuse_layers(loaded.model)
            pack_linears(loaded.model)
            pool_bytes = kv_blocks * block_size * loaded.kv_bytes_per_token
            self._cache = DecodeCache(self.pool, loaded.kv_bytes_per_token, max(pool_bytes, MIN_CACHE_BYTES))
        self._prunes = self._keeps_logits and prunes(loaded.model)
        self._chain: StraightModel | None = straight(loaded.model)
        self._serial = 0
        self._tainted: set[int] = set()  # blocks that may hold values that are not finite

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        """Compute ``plan`` once (``repeat`` is for simulations) and sample."""
        outcome = _Outcome()
        if not plan.empty:
            cause: Exception | None = None
            try:
                outcome.tokens, outcome.failed = self._run_plan(plan)
            except Exception as error:
                cause = error
            if cause is not None:  # out of the except block, so that the frames that raised can be freed
                self._rows.forget()  # and with them the cache, which misses the tokens that the parts write
                self._divide([*plan.decode_rows(), *plan.chunks], plan.step, cause, outcome)
            for sequence, _ in outcome.failed:
                self._tainted.update(sequence.blocks)
                self._rows.forget()  # its row may hold them too, behind the tokens of whoever gets it
            self.timers.steps += 1
        result = StepResult((self._clock.now(),), outcome.tokens, failed=outcome.failed)
        if outcome.oom:
            oom, fitted = outcome.loads()
            result = result._replace(oom=oom, fitted=fitted)
        return result

    def release(self, sequence: Sequence) -> None:
        """Forget ``sequence``."""
        sequence.data = None

    def logits(self, plan: StepPlan) -> tuple[Tensor, list[Sequence]]:
        """Compute ``plan`` and return logits ``[rows that sample, vocab]`` and whose they are, instead of sampling.

        Errors propagate.
        """
        try:
            with torch.inference_mode():
                ids, keep, step, sampling = self._prepare(plan)
                return self._forward(ids, keep, step), sampling
        except Exception:
            self._rows.forget()
            raise

    def _run_plan(self, plan: StepPlan) -> tuple[list[Token], list[tuple[Sequence, BaseException]]]:
        started = time.process_time()
        with torch.inference_mode():
            ids, keep, step, sampling = self._prepare(plan)
            prepared = time.process_time()
            logits = self._forward(ids, keep, step)
            computed = time.process_time()
            done = self._sample(logits, sampling, unsound_chunks(plan.chunks, step))
        timers = self.timers
        timers.prepare_s += prepared - started
        timers.forward_s += computed - prepared
        timers.sample_s += time.process_time() - computed
        return done

    def _prepare(self, plan: StepPlan) -> tuple[Tensor, Tensor, StepInputs, list[Sequence]]:
        rows = self._rows
        left, taken = rows.advance(plan)
        cached = self._cache is not None and self._cache.advance(rows, left, taken)
        positions = rows.positions
        slots = rows.slots(positions)
        decode: DecodeInputs | None = None
        if len(rows.sequences):
            decode = self._cache if cached else self._padded(rows.table(int(positions.max()) + 1), positions)
        return self._assemble(rows.sequences, positions, slots, decode, plan.chunks)

    def _padded(self, table: Ints, positions: Ints) -> PaddedDecode:
        return PaddedDecode(to_device(table, self.device), to_device(positions + 1, self.device), self.pool.block_size)

    def _assemble(
        self, rows: Seq[Sequence], positions: Ints, slots: Ints, decode: DecodeInputs | None, chunks: Seq[Chunk]
    ) -> tuple[Tensor, Tensor, StepInputs, list[Sequence]]:
        """Input ids and positions ``[2, tokens]``, the rows whose logits are wanted, the step, and who samples."""
        size = self.pool.block_size
        ids = [s.output[-1] for s in rows]
        sampling, at = list(rows), len(ids)
        all_positions, all_slots = [positions], [slots]
        keep = list(range(at))
        inputs: list[ChunkInputs] = []
        for chunk in chunks:
            ids += chunk_tokens(chunk)
            all_positions.append(np.arange(chunk.start, chunk.start + chunk.count))
            all_slots.append(chunk_slots(chunk, size))
            table = None
            if chunk.start:
                blocks = -(-(chunk.start + chunk.count) // size)
                table = to_device([chunk.sequence.blocks[:blocks]], self.device)
            inputs.append(ChunkInputs(at, at + chunk.count, chunk.start, table))
            at += chunk.count
            if chunk.samples:
                keep.append(at - 1)
                sampling.append(chunk.sequence)
        if self._tainted:
            self._scrub(rows, positions, chunks)
        if chunks:
            positions, slots = np.concatenate(all_positions), np.concatenate(all_slots)
        tokens = to_device(np.stack([np.array(ids, np.int64), positions]), self.device)
        self._serial += 1
        step = StepInputs(
            self._serial, self.pool, to_device(slots, self.device), decode, inputs, self._cache is not None
        )
        return tokens, to_device(keep, self.device), step, sampling

    def _scrub(self, rows: Seq[Sequence], positions: Ints, chunks: Seq[Chunk]) -> None:
        """Zero the tainted blocks whose first slot this step writes: they have a new owner, who will not fill them at once."""
        size = self.pool.block_size
        fresh = [s.blocks[p // size] for s, p in zip(rows, positions.tolist(), strict=True) if p % size == 0]
        for chunk in chunks:
            end = chunk.start + chunk.count
            fresh += chunk.sequence.blocks[-(-chunk.start // size) : -(-end // size)]
        found = self._tainted.intersection(fresh)
        if found:
            self.pool.scrub(sorted(found))
            self._tainted -= found

    def _forward(self, tokens: Tensor, keep: Tensor, step: StepInputs) -> Tensor:
        """Logits of the rows in ``keep``. One row at least goes through the head, to spare models an empty input."""
        wanted = keep if len(keep) else torch.zeros(1, dtype=torch.int64, device=self.device)
        fewer = len(wanted) < tokens.shape[1]
        chain = self._chain if self._chain is not None and self._chain.applies else None
        if fewer and self._prunes and (chain is not None or self._chain is None):
            step.wanted, fewer = wanted, False  # the last layer leaves out the others
        with self._model.running(step):
            if chain is not None:
                logits = chain(tokens[:1], tokens[1:], wanted if fewer else None)[0]
            else:
                extra = {"logits_to_keep": wanted} if fewer and self._keeps_logits else {}
                out = self.loaded.model(input_ids=tokens[:1], position_ids=tokens[1:], use_cache=False, **extra)
                logits = out.logits[0] if self._keeps_logits or not fewer else out.logits[0][wanted]
        self.hook_calls = step.calls
        return logits[: len(keep)]

    def _sample(
        self, logits: Tensor, sequences: list[Sequence], failed: list[tuple[Sequence, BaseException]]
    ) -> tuple[list[Token], list[tuple[Sequence, BaseException]]]:
        if not sequences:
            return [], failed
        tokens: list[Token] = []
        for sequence, sampled in zip(sequences, self.sampler.sample(logits, sequences), strict=True):
            if isinstance(sampled, Token):
                tokens.append(sampled)
            else:
                failed.append((sequence, sampled))
        return tokens, failed

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
                ids, keep, inputs, sampling = self._prepare_part(rows, chunks, step)
                logits = self._forward(ids, keep, inputs)
                tokens, failed = self._sample(logits, sampling, unsound_chunks(chunks, inputs))
        except Exception as error:
            cause = error
        else:
            outcome.tokens += tokens
            outcome.failed += failed
            outcome.fitted.append(work)
            return
        self._divide(work, step, cause, outcome)

    def _prepare_part(
        self, rows: list[Sequence], chunks: list[Chunk], step: int
    ) -> tuple[Tensor, Tensor, StepInputs, list[Sequence]]:
        """Inputs of a part of a step, from scratch: this path is rare, so it keeps nothing."""
        size = self.pool.block_size
        positions = np.array([s.computed + step - s.joined for s in rows], np.int64)
        slots = np.array([s.blocks[p // size] * size + p % size for s, p in zip(rows, positions.tolist(), strict=True)])
        decode = None
        if rows:
            width = int(positions.max()) // size + 1
            table = np.full((len(rows), width), self.pool.pad_block, np.int64)
            for row, sequence in enumerate(rows):
                known = sequence.blocks[: int(positions[row]) // size + 1]
                table[row, : len(known)] = known
            decode = self._padded(table, positions)
        return self._assemble(rows, positions, slots.astype(np.int64), decode, chunks)
