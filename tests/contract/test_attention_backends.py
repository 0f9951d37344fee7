"""Every attention backend against attention by its definition, over packed batches of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from runtime.errors import MissingTritonError
from runtime.llm.plan import Chunk, DecodeSet, StepPlan
from runtime.records import LimitedBy
from runtime.request import Request, SamplingParams, Sequence
from runtime.torch_backend.attention import AttentionBackend, Terms
from runtime.torch_backend.contract import KVLayer
from runtime.torch_backend.cpu.attention import PagedAttention
from runtime.torch_backend.inputs import DecodeRows, PackedBatch, chunk_slots
from runtime.torch_backend.kv_pool import KVPool
from runtime.torch_backend.padded import PaddedAttention
from tests.tiers import SLOW
from tests.unit.plain_attention import by_definition

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 32, 4
CPU = torch.device("cpu")
BACKENDS: dict[str, Callable[[KVPool], AttentionBackend]] = {
    "padded": lambda pool: PaddedAttention(pool, CPU),
    "cpu": lambda pool: PagedAttention(pool, CPU),
}
try:
    from runtime.torch_backend.cuda import language
    from runtime.torch_backend.cuda.backend import PagedAttention as TritonAttention
except MissingTritonError:
    pass
else:
    if language.INTERPRETED.value:  # tensors are on the CPU here
        BACKENDS["cuda"] = lambda pool: TritonAttention(pool, CPU, splits=2)
TERMS = {
    "plain": Terms(0.3, None, None, None),
    "window": Terms(0.3, 7, None, None),
    "softcap": Terms(0.3, None, 1.5, None),
    "sinks": Terms(0.3, 7, None, torch.linspace(-2, 2, HEADS)),
}


class Kept(NamedTuple):
    """What a sequence has computed in one layer, beside the pool: keys and values ``[kv_heads, tokens, dim]``."""

    keys: torch.Tensor
    values: torch.Tensor

    def and_then(self, key: torch.Tensor, value: torch.Tensor) -> Kept:
        return Kept(*(torch.cat([a, b.transpose(0, 1)], 1) for a, b in ((self.keys, key), (self.values, value))))


class Driver:
    """Sequences over one pool of two layers, of random content, and what each layer's attention ought to be."""

    def __init__(self, make: Callable[[KVPool], AttentionBackend], terms: Terms, seed: int) -> None:
        self.random, self.terms = random.Random(seed), terms
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = KVPool(80, BLOCK)
        kept = KVLayer((KV_HEADS, DIM), (KV_HEADS, DIM), torch.float32)
        self.layers = [self.pool.layer(torch.nn.Identity(), kept, CPU) for _ in range(2)]
        self.free = self.random.sample(range(80), 80)
        self.backend = make(self.pool)
        self.rows = DecodeRows(BLOCK, self.pool.pad_block)
        self.kept: dict[Sequence, list[Kept]] = {}

    def sequence(self, name: str) -> Sequence:
        made = Sequence(Request(name, (0,) * 100, SamplingParams(), 100, 0.0))
        none = torch.zeros(KV_HEADS, 0, DIM)
        self.kept[made] = [Kept(none, none) for _ in self.layers]
        return made

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def run(self, batch: PackedBatch) -> None:
        """One forward: plan, then in each layer write and attend; compares every token."""
        state = self.backend.plan(batch)
        positions = batch.rows.positions
        slots = [torch.from_numpy(batch.rows.slots(positions))]
        slots += [torch.from_numpy(chunk_slots(chunk, BLOCK)) for chunk in batch.chunks]
        places = torch.cat(slots)
        spans = [(s, at, at + 1) for at, s in enumerate(batch.rows.sequences)]
        spans += [(chunk.sequence, *span) for chunk, span in zip(batch.chunks, batch.spans(), strict=True)]
        for index, layer in enumerate(self.layers):
            # views of one tensor, as of a merged product
            packed = self._normal(len(places), HEADS + 2 * KV_HEADS, DIM)
            query, key, value = packed.split([HEADS, KV_HEADS, KV_HEADS], 1)
            layer.keys[places], layer.values[places] = key, value
            found = self.backend.run(state, layer, query, key, value, self.terms)
            assert found.shape == (len(places), HEADS, DIM) and found.is_contiguous()
            for sequence, begin, end in spans:
                grown = self.kept[sequence][index].and_then(key[begin:end], value[begin:end])
                self.kept[sequence][index] = grown
                expected = by_definition(query[begin:end].transpose(0, 1), *grown, self.terms)
                torch.testing.assert_close(found[begin:end].transpose(0, 1).double(), expected, rtol=1e-4, atol=1e-5)

    def grow(self, sequence: Sequence, tokens: int) -> None:
        while len(sequence.blocks) * BLOCK < tokens:
            sequence.blocks.append(self.free.pop())

    def chunk(self, sequence: Sequence, count: int) -> Chunk:
        start = self.kept[sequence][0].keys.shape[1]
        self.grow(sequence, start + count)
        return Chunk(sequence, start, count, True)

    def alone(self, decoding: list[Sequence], chunks: list[Chunk]) -> PackedBatch:
        """A batch that has no step before it."""
        for sequence in decoding:
            sequence.computed, sequence.joined = self.kept[sequence][0].keys.shape[1], 0
            self.grow(sequence, sequence.computed + 1)
        return PackedBatch(DecodeRows.alone(BLOCK, self.pool.pad_block, decoding, 0), chunks)


@pytest.mark.parametrize(
    ("make", "terms"),
    [
        pytest.param(
            make,
            terms,
            id=f"{name}-{term}",
            marks=SLOW if name == "cuda" and term != "sinks" else (),
        )
        for name, make in BACKENDS.items()
        for term, terms in TERMS.items()
    ],
)
def test_batches_that_stand_alone(make: Callable[[KVPool], AttentionBackend], terms: Terms) -> None:
    driver = Driver(make, terms, 1)
    a, b, c, d = (driver.sequence(name) for name in "abcd")
    driver.run(driver.alone([], [driver.chunk(a, 1)]))
    driver.run(driver.alone([], [driver.chunk(a, 20), driver.chunk(b, 4), driver.chunk(c, 9)]))
    driver.run(driver.alone([a, b], [driver.chunk(c, 14), driver.chunk(d, 3)]))
    driver.run(driver.alone([b], []))
    driver.run(driver.alone([d, a, c, b], []))


@pytest.mark.parametrize(
    "make",
    [pytest.param(b, id=name, marks=SLOW if name == "cuda" else ()) for name, b in BACKENDS.items()],
)
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())
def test_rows_that_are_followed_from_step_to_step(make: Callable[[KVPool], AttentionBackend], terms: Terms) -> None:
    """Rows join and leave while the others grow, beside prompts in chunks."""
    driver, decodes = Driver(make, terms, 2), DecodeSet()
    names = iter("abcdefghijkl")
    prompts: dict[Sequence, int] = {}
    for step in range(24):
        if step % 4 == 0:
            prompts[driver.sequence(next(names))] = driver.random.randint(1, 24)
        ready = [s for s, left in prompts.items() if not left]
        if ready:
            joined = ready[0]
            del prompts[joined]
            joined.computed, joined.joined = driver.kept[joined][0].keys.shape[1], step
            decodes.members[joined] = None
            decodes.version += 1
        if step % 5 == 4 and len(decodes.members) > 1:
            gone = driver.random.choice(list(decodes.members))
            del decodes.members[gone]
            decodes.version += 1
            driver.free = gone.blocks + driver.free
        for sequence in decodes.members:
            driver.grow(sequence, sequence.computed + step - sequence.joined + 1)
        chunks = []
        for sequence, left in prompts.items():
            count = min(left, driver.random.randint(1, 9))
            if count:
                chunks.append(driver.chunk(sequence, count))
                prompts[sequence] -= count
        plan = StepPlan(
            step, len(decodes), 0, tuple(chunks), decodes, decodes.version, 1, float("inf"), 0, 8, LimitedBy.DEMAND, 0
        )
        driver.rows.advance(plan)
        if len(decodes) or chunks:
            driver.run(PackedBatch(driver.rows, chunks))
    assert len(driver.kept) == 6
