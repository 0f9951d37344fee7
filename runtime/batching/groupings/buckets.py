"""Length buckets: items of similar cost go together, so that padding wastes little.

Bucket k holds costs up to ``first``·``growth``^k. The bucket whose oldest item has waited longest goes next, so an item of a
rare length waits no longer than its turn (strategies that hold out for full calls take full buckets meanwhile). Padding
inside a bucket is at most the factor ``growth``, plus the first bucket's width. For models that pad; costs some waiting
where calls are not full, since a call holds one bucket only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from runtime.batching.groupings.arrival import Line
from runtime.batching.item import Item


class LengthBuckets:
    """See the module."""

    padded = True
    in_order = False

    def __init__(self, growth: float = 1.5, first: int = 16) -> None:
        if not 1 < growth < math.inf:
            raise ValueError(f"growth is {growth!r}; it must be a number above 1")
        if first < 1:
            raise ValueError(f"first is {first!r}; it must be at least 1")
        self._log = 1 / math.log(growth)
        self._first = first
        self._lines: dict[int, Line] = {}

    def bucket(self, cost: int) -> int:
        """Which bucket an item of ``cost`` goes to."""
        return 0 if cost <= self._first else math.ceil(math.log(cost / self._first) * self._log - 1e-9)

    def add(self, item: Item) -> None:
        bucket = self.bucket(item.cost)
        line = self._lines.get(bucket)
        if line is None:
            line = self._lines[bucket] = Line()
        line.add(item)

    def first(self, most: int) -> list[Item]:
        oldest = self.oldest()
        return [] if oldest is None else self._lines[self.bucket(oldest.cost)].first(most)

    def groups(self, most: int) -> Iterator[list[Item]]:
        """The buckets, the one whose oldest item has waited longest first."""
        heads = [(head.arrival, bucket) for bucket, line in self._lines.items() if (head := line.head()) is not None]
        for _, bucket in sorted(heads):
            yield self._lines[bucket].first(most)

    def took(self, items: Sequence[Item]) -> None:
        self._left(self.bucket(items[0].cost), len(items))

    def removed(self, item: Item) -> None:
        self._left(self.bucket(item.cost), 1)

    def _left(self, bucket: int, count: int) -> None:
        line = self._lines[bucket]
        line.left(count)
        if line.head() is None:
            del self._lines[bucket]

    def oldest(self) -> Item | None:
        heads = [head for line in self._lines.values() if (head := line.head()) is not None]
        return min(heads, key=lambda item: item.arrival, default=None)
