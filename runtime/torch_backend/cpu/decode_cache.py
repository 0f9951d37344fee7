"""Contiguous keys and values of the sequences that decode, for the CPU.

Reading a row's context block by block from the pool costs a copy in every step. Here each decoding sequence has a row of
its own, copied from the pool once when it begins to decode and extended by one token a step, so that attention over
all rows is two batched matrix products and a softmax on memory as it lies. In bfloat16 keys are stored transposed, the
layout oneDNN's product reads without reordering (32 rows of 256 tokens, 2 heads: 0.13 ms against 0.43).

Rows are kept in classes of like length, so that one long row does not pad all others. All rows grow by one token a step,
so a row stays in the class it joined, and the class's memory grows with it. What lies behind a row's tokens is masked, but must
be finite: zeros, or what an earlier row left there. (After a row that was not finite all are dropped.) The pool keeps every
token as well, so any row can be loaded from it at any time: that is how the cache recovers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from runtime.torch_backend.attention import Terms
from runtime.torch_backend.inputs import DecodeRows, Ints
from runtime.torch_backend.kv_pool import KVPool, LayerKV
from runtime.torch_backend.memory import prefer_huge_pages
from runtime.torch_backend.padded import softmax_weights

PADDING = 1536 << 10  # bytes of padding in a layer's rows of a class beyond which a class of their own is cheaper
GROWTH = 64  # tokens of room that a class gets at least when it is made or full
_ROUND = 16  # short context lengths are padded to a multiple of this; GROWTH is one


def _padded(length: int) -> int:
    """A little more: a product of a shape that oneDNN has not met takes 0.15 ms to prepare, so let there be few of them."""
    step = _ROUND if length <= 128 else 2 * _ROUND if length <= 256 else GROWTH
    return -(-length // step) * step


class LengthClass:
    """Rows of up to ``capacity`` tokens, and where they stand in the current step."""

    def __init__(self) -> None:
        self.capacity = 0
        self.homes: list[int] = []
        self.allocated = 0  # rows in each store
        self.stores: dict[LayerKV, tuple[Tensor, Tensor]] = {}
        self.moves: list[tuple[int, int, int]] = []  # (to, from, tokens): rows to copy in this step, before any load
        self.loads: list[tuple[int, Tensor, int]] = []  # (row, its blocks, tokens): rows to be read from the pool
        self.begin = 0  # of its rows in the packed batch
        self.length = 0  # padded context of this step
        self._positions: Ints = np.zeros(0, np.int64)
        self._masks: dict[tuple[object, ...], Tensor] = {}
        self._places: dict[tuple[int, ...], Tensor] = {}

    def fit(self, longest: int) -> bool:
        """Make room for ``longest`` tokens and some more; returns whether that took any."""
        if longest <= self.capacity:
            return False
        self.capacity = -(-(longest + max(GROWTH, longest // 8)) // GROWTH) * GROWTH
        return True

    def begin_step(self, begin: int, positions: Ints) -> None:
        self.begin = begin
        self._positions = positions
        self.length = min(self.capacity, _padded(int(positions.max()) + 1))
        self._masks.clear()
        self._places.clear()

    def mask(self, heads: int, group: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """``[rows·heads, group, length]``: 0 where a row may look, −inf elsewhere; made once a step."""
        kind = (heads, group, window, dtype)
        found = self._masks.get(kind)
        if found is None:
            last = torch.from_numpy(self._positions)[:, None]
            at = torch.arange(self.length)[None, :]
            hidden = at > last if window is None else (at > last) | (at <= last - window)
            row = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            shape = (len(self.homes), heads, group, self.length)
            found = self._masks[kind] = row[:, None, None, :].expand(shape).reshape(-1, group, self.length)
        return found

    def places(self, heads: int, dim: int) -> Tensor:
        """Where the new tokens go: with ``dim`` 0 as rows of ``[rows·heads·capacity, dim]``, else as single elements of
        ``[rows·heads·dim·capacity]``."""
        found = self._places.get((heads, dim))
        if found is None:
            count, inner = len(self.homes), max(dim, 1)
            first = np.arange(count * heads * inner).reshape(count, -1) * self.capacity
            found = self._places[heads, dim] = torch.from_numpy((first + self._positions[:, None]).reshape(-1))
        return found


class DecodeCache:
    """The decode rows of a step over contiguous rows; a :class:`~runtime.torch_backend.padded.DecodeInputs`.

    ``token_bytes``: of one token's keys and values in all layers. A step whose rows would take more than ``max_bytes`` is
    not taken on: :meth:`advance` returns False, and the step has to read from the pool.
    """

    def __init__(self, pool: KVPool, token_bytes: int, max_bytes: int) -> None:
        self.pool = pool
        self.count = 0
        self._token_bytes = token_bytes
        self._max_bytes = max_bytes
        self._classes: list[LengthClass] = []
        self._where: dict[int, LengthClass] = {}
        self._order: Ints = np.zeros(0, np.int64)
        self._generation = -1

    def clear(self) -> None:
        """Forget every row; the next :meth:`advance` loads all of them anew."""
        self._classes.clear()
        self._where.clear()

    def advance(self, rows: DecodeRows, left: Seq[int], taken: Seq[int]) -> bool:
        """Follow ``rows``, of which ``left`` and ``taken`` changed, and put them into the order of the classes."""
        if rows.generation != self._generation or not self._where:
            self.clear()
            self._generation = rows.generation
            left, taken = [], rows.order.tolist()
        for cls in self._classes:
            cls.moves.clear()
        for home in left:
            self._remove(home, rows)
        stale = set(taken)  # homes whose row has to be loaded
        for home in sorted(taken, key=rows.position_at, reverse=True):
            cls = self._class_for(rows, rows.position_at(home))
            cls.homes.append(home)
            self._where[home] = cls
        if left or taken:
            self._classes = [cls for cls in self._classes if cls.homes]
        if not self._allocate(rows, stale):
            return False
        if left or taken or rows.order is not self._order:
            self._order = np.fromiter(chain.from_iterable(c.homes for c in self._classes), np.int64)
            rows.arrange(self._order)
        positions = rows.positions
        begin = 0
        for cls in self._classes:
            end = begin + len(cls.homes)
            cls.begin_step(begin, positions[begin:end])
            cls.loads = self._loads(cls, rows, stale) if stale else []
            begin = end
        self.count = begin
        return True

    def _class_for(self, rows: DecodeRows, position: int) -> LengthClass:
        """The class that a row at ``position`` pads least, or pads the row least; a new one if every class gets too much."""
        allowed = PADDING * max(1, len(self.pool.layers)) // self._token_bytes  # in tokens
        best, least = None, allowed + 1
        for cls in self._classes:
            positions = rows.positions_at(cls.homes)
            before = int(positions.max()) if cls.homes else position
            longest = max(before, position)
            padding = longest * (len(cls.homes) + 1) - int(positions.sum()) - position
            if padding <= allowed and (added := longest - position + (longest - before) * len(cls.homes)) < least:
                best, least = cls, added
        if best is None:
            best = LengthClass()
            self._classes.append(best)
        return best

    def _loads(self, cls: LengthClass, rows: DecodeRows, stale: set[int]) -> list[tuple[int, Tensor, int]]:
        loads = []
        for row, home in enumerate(cls.homes):
            if home in stale:
                tokens = rows.position_at(home)
                blocks = rows.sequence_at(home).blocks[: -(-tokens // self.pool.block_size)]
                loads.append((row, torch.tensor([blocks]), tokens))
        return loads

    def _remove(self, home: int, rows: DecodeRows) -> None:
        """Take a row out; the last row of its class fills the gap."""
        cls = self._where.pop(home, None)
        if cls is None:
            return
        row = cls.homes.index(home)
        last = cls.homes.pop()
        if last != home:
            cls.homes[row] = last
            cls.moves.append((row, len(cls.homes), rows.position_at(last)))

    def _allocate(self, rows: DecodeRows, stale: set[int]) -> bool:
        """Make room for every class's rows. Without room to spare, classes are cut to size and loaded anew."""
        growing = False
        for cls in self._classes:
            growing |= cls.fit(rows.longest(cls.homes) + 1)
            count = len(cls.homes)
            if count > cls.allocated:
                cls.allocated = count if count < 4 else -(-count * 3 // 8) * 4  # half as many again, in fours
                growing = True
        if growing and self._bytes() > self._max_bytes:
            for cls in self._classes:
                cls.allocated = len(cls.homes)
                cls.capacity = -(-(rows.longest(cls.homes) + 1) // _ROUND) * _ROUND
            if self._bytes() > self._max_bytes:
                self.clear()
                return False
            for cls in self._classes:
                cls.stores.clear()
                cls.moves.clear()
                stale.update(cls.homes)
        return True

    def _bytes(self) -> int:
        return self._token_bytes * sum(c.allocated * c.capacity for c in self._classes)

    def attend(self, layer: LayerKV, query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
        """See :class:`~runtime.torch_backend.padded.DecodeInputs`."""
        parts = [self._attend(cls, layer, query, key, value, terms) for cls in self._classes]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(
        self, cls: LengthClass, layer: LayerKV, query: Tensor, key: Tensor, value: Tensor, terms: Terms
    ) -> Tensor:
        _, heads, dim = query.shape
        _, kv_heads, value_dim = value.shape
        count, group, length = len(cls.homes), heads // kv_heads, cls.length
        transposed = key.dtype == torch.bfloat16
        store = cls.stores.get(layer)
        flat = cls.allocated * kv_heads
        if store is None or store[1].shape[:2] != (flat, cls.capacity):
            keys = key.new_zeros((flat, dim, cls.capacity) if transposed else (flat, cls.capacity, dim))
            values = value.new_zeros(flat, cls.capacity, value_dim)
            for part in (keys, values):
                prefer_huge_pages(part, now=False)
            if store is not None:
                _grown(keys, store[0])
                _grown(values, store[1])
            store = cls.stores[layer] = keys, values
        keys, values = store
        for row, source, tokens in cls.moves:
            to, of = (slice(r * kv_heads, (r + 1) * kv_heads) for r in (row, source))
            if transposed:
                keys[to, :, :tokens] = keys[of, :, :tokens]
            else:
                keys[to, :tokens] = keys[of, :tokens]
            values[to, :tokens] = values[of, :tokens]
        for row, blocks, tokens in cls.loads:
            self._load(layer, row, blocks, tokens, keys, values, transposed)
        rows = slice(cls.begin, cls.begin + count)
        new_keys = key[rows].reshape(count * kv_heads, dim)
        if transposed:
            keys.view(-1).index_put_((cls.places(kv_heads, dim),), new_keys.reshape(-1))
            seen = keys[: count * kv_heads, :, :length]
        else:
            keys.view(-1, dim).index_copy_(0, cls.places(kv_heads, 0), new_keys)
            seen = keys[: count * kv_heads, :length].transpose(1, 2)
        new_values = value[rows].reshape(count * kv_heads, value_dim)
        values.view(-1, value_dim).index_copy_(0, cls.places(kv_heads, 0), new_values)
        # the heads that share a KV head become the rows of one product: no copy of the keys
        grouped = query[rows].reshape(count * kv_heads, group, dim)
        mask = cls.mask(kv_heads, group, terms.window, key.dtype)
        if terms.plain:
            weights = torch.softmax(torch.baddbmm(mask, grouped, seen, alpha=terms.scale), -1)
        else:
            scores = torch.bmm(grouped, seen) * terms.scale
            if terms.softcap is not None:
                scores = torch.tanh(scores / terms.softcap) * terms.softcap
            sinks = None if terms.sinks is None else terms.sinks.view(kv_heads, group).repeat(count, 1)[..., None]
            weights = softmax_weights(scores + mask, sinks).to(values.dtype)
        return torch.bmm(weights, values[: count * kv_heads, :length]).view(count, heads, value_dim)

    def _load(
        self, layer: LayerKV, row: int, blocks: Tensor, tokens: int, keys: Tensor, values: Tensor, transposed: bool
    ) -> None:
        """Copy ``tokens`` positions of a sequence from the pool."""
        past_keys, past_values = layer.blocks(blocks, self.pool.block_size)
        kv_heads = past_keys.shape[2]
        at = slice(row * kv_heads, (row + 1) * kv_heads)
        if transposed:
            keys[at, :, :tokens] = past_keys[0, :tokens].permute(1, 2, 0)
        else:
            keys[at, :tokens] = past_keys[0, :tokens].transpose(0, 1)
        values[at, :tokens] = past_values[0, :tokens].transpose(0, 1)


def _grown(to: Tensor, old: Tensor) -> None:
    """Copy what ``old`` holds into the corner of ``to``, which has as much room or more in every dimension but the first."""
    rows = min(len(to), len(old))
    to[:rows, : old.shape[1], : old.shape[2]] = old[:rows]
