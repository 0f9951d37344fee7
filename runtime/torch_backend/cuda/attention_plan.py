"""What the programs of one attention launch do: which query tile, and which part of its context.

A *tile* is up to ``tile`` consecutive new tokens of one sequence. Its context is split where one program would take long
beside the others; what the parts find is then merged. Decode rows and prompt chunks differ in nothing but their number of
tokens.

The grid of a launch depends on :class:`PlanSizes` alone, never on what a step holds: an *item* of the work list that has
nothing to do says so and its program ends at once. So a captured graph serves every step that fits its sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from runtime.torch_backend.cuda.tiles import FEW_ROWS, MANY_ROWS, next_power_of_2

Ints = NDArray[np.int32]

GRAIN = 128
"""Contexts are split at multiples of this many positions."""

LEAST = 2
"""Grains of the shortest part: below that, merging costs more than it saves."""

WAVES = 2
"""Programs for each multiprocessor that splitting aims at."""

END = 2**31 - 1
ITEM = 5
"""Numbers of an item: sequence (−1: nothing to do), first token of the tile, first and last position (exclusive) of the
part, and the place of its partial result (−1: it is the only part and writes the output)."""

MERGE = 4
"""Numbers of a merge: sequence (−1: nothing to do), first token of the tile, place of the first partial result, number of
parts."""


class PlanSizes(NamedTuple):
    """What a launch is sized by. ``sequences`` and ``tokens``: the most a step may hold, of ``each`` sequence at most so
    many tokens; ``tile``: tokens of a tile; ``rows``: rows of a tile (tokens × heads of a KV head, padded); ``splits``: how
    many parts there may be beyond one a tile."""

    sequences: int
    tokens: int
    each: int
    tile: int
    rows: int
    splits: int

    @property
    def tiles(self) -> int:
        """The most tiles ``tokens`` tokens of ``sequences`` sequences can make."""
        begun = min(self.sequences, self.tokens)
        longest = self.sequences * -(-self.each // self.tile)
        return min(longest, begun + (self.tokens - begun) // self.tile)

    @property
    def items(self) -> int:
        return self.tiles + self.splits

    @property
    def partials(self) -> int:
        """A tile in p parts takes p − 1 of the splits, which is p/2 or more."""
        return 2 * self.splits


def plan_sizes(
    sequences: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    multiprocessors: int,
    *,
    each: int | None = None,
    splits: int | None = None,
) -> PlanSizes:
    """Sizes for steps of up to ``sequences`` sequences and ``tokens`` new tokens.

    ``each``: the most new tokens of one sequence (1: steps that only decode), by default ``tokens``; few make small tiles.
    ``splits`` None: as many as give every multiprocessor ``WAVES`` programs even if a single sequence has all the context;
    0: no context is split, and there is nothing to merge. Raises ``ValueError`` for numbers below 1, and heads that do not
    divide.
    """
    each = tokens if each is None else each
    for name, value in (("sequences", sequences), ("tokens", tokens), ("each", each), ("kv_heads", kv_heads)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if heads < 1 or heads % kv_heads:
        raise ValueError(f"heads is {heads}; it must be a multiple of kv_heads, {kv_heads}")
    if splits is None:
        splits = -(-WAVES * multiprocessors // kv_heads)
    elif splits < 0:
        raise ValueError(f"splits is {splits}; it must be at least 0")
    group, each = heads // kv_heads, min(each, tokens)
    rows = max(FEW_ROWS, next_power_of_2(group), min(MANY_ROWS, next_power_of_2(group * each)))
    return PlanSizes(sequences, tokens, each, min(each, rows // group), rows, splits)


class AttentionPlan:
    """The work list of a step on the device, in one buffer that :meth:`update` writes in one copy.

    ``starts [sequences + 1]``: where each sequence's new tokens begin in the packed batch; ``lengths [sequences]``: its
    context, new tokens included; ``items [items, 5]`` and ``merges [splits, 4]``: see ``ITEM`` and ``MERGE``. All int32. The
    tensors stay where they are, so that a captured graph reads each step's list. Until the first update nothing is to be done.

    ``merging``: whether a context is in parts; of a ``recorded`` plan, whether one may ever be, since the launch that merges
    is recorded or not.
    """

    def __init__(self, sizes: PlanSizes, device: torch.device | str = "cpu", *, recorded: bool = False) -> None:
        self.sizes = sizes
        self.merging = sizes.splits > 0
        self._recorded = recorded
        self.device = torch.device(device)
        counts = (sizes.items * ITEM, sizes.splits * MERGE, sizes.sequences + 1, sizes.sequences)
        padded = [-(-count // 4) * 4 for count in counts]  # parts begin at 16 bytes: Triton compiles others apart
        # nothing to do yet; filled where it is: a copy from a host buffer waits or, if not, may read what the first update writes
        self._buffer = torch.full((sum(padded),), -1, dtype=torch.int32, device=self.device)
        items, merges, self.starts, self.lengths = (
            part[:count] for part, count in zip(self._buffer.split(padded), counts, strict=True)
        )
        self.items, self.merges = items.view(-1, ITEM), merges.view(-1, MERGE)
        self.unused = torch.empty(ITEM, dtype=torch.float32, device=self.device)
        """In the place of partial results where there are none."""
        self._turn = 0
        # two in turn: the copy of the update before may still read its own
        self._hosts: list[tuple[Tensor, list[Ints]]] = []
        for _ in range(2):
            host = torch.zeros(sum(padded), dtype=torch.int32, pin_memory=self.device.type == "cuda")
            arrays = [part[:count].numpy() for part, count in zip(host.split(padded), counts, strict=True)]
            self._hosts.append((host, arrays))

    def update(self, query_lengths: ArrayLike, lengths: ArrayLike) -> None:
        """Plan a step: new tokens and context (new tokens included) of each sequence, in the order of the packed batch.

        It is right for layers with a sliding window as well, only less even. The copy to the device is asynchronous, in the
        order of what is queued there: that of the last update but one must be done, as it is where steps overlap one deep.
        Raises ``ValueError`` for what does not fit the sizes.
        """
        new, context = _whole("query_lengths", query_lengths), _whole("lengths", lengths)
        sizes = self.sizes
        if new.shape != context.shape or len(new) > sizes.sequences:
            raise ValueError(
                f"query_lengths has {len(new)} entries and lengths {len(context)}; both must have as many, "
                f"at most {sizes.sequences}"
            )
        if new.sum() > sizes.tokens:
            raise ValueError(f"query_lengths add up to {new.sum()} tokens; the plan is for at most {sizes.tokens}")
        if (new > sizes.each).any():
            raise ValueError(
                f"query_lengths holds {new.max()}; the plan is for at most {sizes.each} tokens of one sequence"
            )
        if (new < 0).any() or (context < new).any():
            at = int(np.flatnonzero((new < 0) | (context < new))[0])
            raise ValueError(
                f"query_lengths[{at}] is {new[at]} and lengths[{at}] {context[at]}; both must be at least 0 "
                "and the context no shorter"
            )
        items, merges = work_list(new, context, sizes)
        if not self._recorded:
            self.merging = len(merges) > 0
        self._turn ^= 1
        host, (flat_items, flat_merges, starts, kept) = self._hosts[self._turn]
        for array, rows in ((flat_items.reshape(-1, ITEM), items), (flat_merges.reshape(-1, MERGE), merges)):
            array[: len(rows)] = rows
            array[len(rows) :, 0] = -1
        starts[0] = 0
        np.cumsum(new, out=starts[1 : len(new) + 1])
        starts[len(new) + 1 :] = starts[len(new)]
        kept[: len(new)] = context
        kept[len(new) :] = 0
        self._buffer.copy_(host, non_blocking=True)


def work_list(new: Ints, context: Ints, sizes: PlanSizes) -> tuple[Ints, Ints]:
    """Items ``[≤ items, 5]`` and merges ``[≤ splits, 4]`` of a step, the longest items first.

    With n tiles whose contexts hold g₁ … gₙ grains, parts of c = ⌈Σ(g − 1) / splits⌉ grains are at most n + splits, since
    ⌈g/c⌉ = 1 + ⌊(g − 1)/c⌋.
    """
    tile = sizes.tile
    counts = -(-new // tile)
    total = int(counts.sum())
    sequence = np.repeat(np.arange(len(new), dtype=np.int32), counts)
    first = (np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
    before = (context - new)[sequence]
    last = before + np.minimum(first + tile, new[sequence])
    grains = -(-last // GRAIN)
    if sizes.splits:
        most = max(LEAST, -(-int((grains - 1).sum()) // sizes.splits))
        parts = -(-grains // most)
    else:
        parts = np.ones_like(grains)
    each = -(-grains // np.maximum(parts, 1))  # as even as whole grains allow
    parts = np.maximum(1, -(-grains // np.maximum(each, 1)))

    of = np.repeat(np.arange(total), parts)
    part = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)
    split = parts > 1
    places = np.cumsum(np.where(split, parts, 0)) - np.where(split, parts, 0)
    low = part * each[of] * GRAIN
    high = low + each[of] * GRAIN
    work = np.minimum(high, last[of]) - low
    high[part == parts[of] - 1] = END
    items = np.stack([sequence[of], first[of], low, high, np.where(split[of], places[of] + part, -1)], 1).astype(
        np.int32
    )
    merges = np.stack([sequence[split], first[split], places[split], parts[split]], 1).astype(np.int32)
    return items[np.argsort(-work, kind="stable")], merges


def _whole(name: str, values: ArrayLike) -> Ints:
    found = np.asarray(values)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise ValueError(f"{name} has shape {found.shape} and type {found.dtype}; it must be a list of whole numbers")
    return found.astype(np.int32)
