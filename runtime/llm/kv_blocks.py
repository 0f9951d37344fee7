"""The pool of KV blocks: who holds which, and which hold a prefix worth keeping.

A block is free, held by sequences, or idle: held by nobody, its content still known by the hash of the prefix that ends
in it. Idle blocks count as free; they are taken last, the least recently used first. A block has one holder unless a
prefix is shared; only further holders are counted. Of equal blocks one is known, the first to be; with ``every_copy`` all are,
as in vLLM, and the first of them is found. Taking and giving work on slices, so a prompt of any length costs
one list operation unless its blocks carry hashes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class KVBlocks:
    """``total`` blocks of ``block_size`` tokens each, numbered from 0."""

    __slots__ = (
        "_copies",
        "_every_copy",
        "_extra",
        "_free",
        "_hash_of",
        "_idle",
        "_table",
        "block_size",
        "free",
        "published",
        "total",
    )

    def __init__(self, total: int, block_size: int = 16, *, every_copy: bool = False) -> None:
        if total < 1:
            raise ValueError(f"total is {total}; a pool needs at least one block")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block holds at least one token")
        self.total = total
        self.block_size = block_size
        self.free = total
        """Blocks that can be taken now, idle ones included."""
        self._free = list(range(total - 1, -1, -1))  # a stack: low numbers go first
        self._idle: OrderedDict[int, None] = OrderedDict()  # by use; a dict looks for its first among all that went
        self._table: dict[int, int] = {}  # prefix hash -> block
        self._hash_of: dict[int, int] = {}  # block -> prefix hash
        self._every_copy = every_copy
        self._copies: dict[int, dict[int, None]] = {}  # prefix hash -> blocks that hold it beside that of the table
        self._extra: dict[int, int] = {}  # block -> holders beyond the first
        self.published = 0
        """How often a block's content became known: until that grows, no longer prefix can be found."""

    @property
    def cached(self) -> int:
        """Blocks whose content is known by a prefix hash, held or idle."""
        return len(self._table)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def knows(self, digest: int) -> bool:
        """Whether a block holds the prefix ``digest``."""
        return digest in self._table

    def lookup(self, hashes: Sequence[int], most: int) -> list[int]:
        """The blocks of the longest known prefix of ``hashes``, at most ``most`` of them. Changes nothing."""
        found: list[int] = []
        table = self._table
        if not table:
            return found
        for digest in hashes[:most]:
            block = table.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are idle, and so would leave the free count when held."""
        idle = self._idle
        return sum(block in idle for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Become one more holder of each of ``blocks``, which :meth:`lookup` found."""
        for block in blocks:
            if block in self._idle:
                del self._idle[block]
                self.free -= 1
            else:
                self._extra[block] = self._extra.get(block, 0) + 1

    def take(self, count: int) -> list[int]:
        """``count`` blocks with unknown content. The caller has made sure of ``count <= free``."""
        if not count:
            return []
        stack = self._free
        missing = count - len(stack)
        if missing > 0:
            assert missing <= len(self._idle), f"{count} blocks wanted, {self.free} free"
            for _ in range(missing):
                block, _ = self._idle.popitem(last=False)
                self._lost(block, self._hash_of.pop(block))
                stack.append(block)
        self.free -= count
        got = stack[-count:]
        del stack[-count:]
        got.reverse()
        return got

    def give(self, blocks: Sequence[int]) -> None:
        """Let go of ``blocks``, in order of position; the end of a prefix becomes the first to be taken again."""
        if not self._hash_of and not self._extra:
            self._free += blocks[::-1]
            self.free += len(blocks)
            return
        hash_of, extra, idle, free = self._hash_of, self._extra, self._idle, self._free
        before = len(idle) + len(free)
        for block in reversed(blocks):
            if block in extra:
                if extra[block] == 1:
                    del extra[block]
                else:
                    extra[block] -= 1
            elif block in hash_of:
                idle[block] = None
            else:
                free.append(block)
        self.free += len(idle) + len(free) - before

    def publish(self, block: int, digest: int) -> None:
        """Say that ``block``, now held, contains the prefix ``digest``. The first block to say so is found."""
        if block in self._hash_of:
            return
        if digest not in self._table:
            self._table[digest] = block
            self.published += 1
        elif self._every_copy:
            self._copies.setdefault(digest, {})[block] = None
        else:
            return
        self._hash_of[block] = digest

    def _lost(self, block: int, digest: int) -> None:
        """``block`` holds ``digest`` no longer: the next copy of it is found."""
        copies = self._copies.get(digest) if self._copies else None
        if copies is None:
            del self._table[digest]
            return
        if self._table[digest] == block:
            self._table[digest] = block = next(iter(copies))
        del copies[block]
        if not copies:
            del self._copies[digest]

    def forget(self, blocks: Iterable[int]) -> None:
        """Make sure nobody finds ``blocks`` again: their content may be wrong."""
        for block in blocks:
            digest = self._hash_of.pop(block, None)
            if digest is None:
                continue
            self._lost(block, digest)
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every block is accounted for exactly once, given all ``holders``' blocks."""
        count: dict[int, int] = {}
        for blocks in holders:
            assert len(set(blocks)) == len(blocks), "one holder holds a block twice"
            for block in blocks:
                count[block] = count.get(block, 0) + 1
        unheld = self._free + list(self._idle)
        assert len(unheld) == self.free, f"{len(unheld)} blocks are free, {self.free} by the count"
        assert len(set(unheld)) == len(unheld), "a block is free twice"
        assert not count.keys() & set(unheld), "a held block is also free"
        assert len(count) + len(unheld) == self.total, f"{self.total - len(count) - len(unheld)} blocks leaked"
        assert {block: n - 1 for block, n in count.items() if n > 1} == self._extra, "wrong count of shared holders"
        known = [*self._table.items(), *((digest, copy) for digest, copies in self._copies.items() for copy in copies)]
        assert len(known) == len(self._hash_of)
        assert all(self._hash_of[block] == digest for digest, block in known)
        assert self._copies.keys() <= self._table.keys()
        assert all(block in self._hash_of for block in self._idle), "an idle block without a hash"
        assert not any(block in self._hash_of for block in self._free), "a free block with a hash"
