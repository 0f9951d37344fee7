"""Which KV blocks a sequence holds: given when it is admitted, found again by their content, taken back when it leaves."""

from __future__ import annotations

from runtime.llm.kv_blocks import KVBlocks
from runtime.request import Sequence, TokenHasher


class Holdings:
    """The blocks of one scheduler's sequences. ``hasher`` lets outputs be found as prefixes too."""

    def __init__(self, kv: KVBlocks, hasher: TokenHasher | None) -> None:
        self._kv = kv
        self.hasher = hasher
        self._did_not_fit: tuple[Sequence, int, int] | None = None  # and the blocks and known content there were for it

    def uncached(self, sequence: Sequence) -> int:
        """Tokens of ``sequence`` that are to be computed, the last known one at least."""
        if not sequence.hashes:
            return sequence.target
        known = len(self._kv.lookup(sequence.hashes, (sequence.target - 1) // self._kv.block_size))
        return sequence.target - known * self._kv.block_size

    def fits(self, sequence: Sequence, spare: int, *, whole: bool = True) -> bool:
        """Give ``sequence`` the blocks of all its known tokens, if ``spare`` suffice; what was computed before is found. Without
        ``whole`` it is given that alone."""
        kv, before = self._kv, self._did_not_fit
        if before is not None and before[0] is sequence and spare <= before[1] and kv.published == before[2]:
            return False
        found = kv.lookup(sequence.hashes, (sequence.target - 1) // kv.block_size) if sequence.hashes else []
        fresh = kv.blocks_for(sequence.target) - len(found)
        if fresh + (kv.idle_among(found) if found else 0) > spare:
            self._did_not_fit = (sequence, spare, kv.published)
            return False
        self._did_not_fit = None
        if found:
            kv.hold(found)
        sequence.blocks = found + kv.take(fresh) if whole else found
        sequence.computed = len(found) * kv.block_size
        return True

    def publish(self, sequence: Sequence, start: int, end: int | None = None) -> None:
        """Make the full blocks that end after token ``start`` findable, up to token ``end`` (default: what is computed)."""
        size, hashes, blocks = self._kv.block_size, sequence.hashes, sequence.blocks
        last = sequence.computed if end is None else end
        for index in range(start // size, min(last // size, len(hashes))):
            self._kv.publish(blocks[index], hashes[index])

    def release(self, sequence: Sequence, *, trusted: bool) -> None:
        """Take the blocks back. Full ones with a known hash can still be found, unless a failed step wrote them."""
        if not sequence.blocks:
            return
        if not trusted:
            self._kv.forget(sequence.blocks)
        else:
            if self.hasher is not None and sequence.generated:
                self.hasher(sequence)
            if sequence.hashes:
                self.publish(sequence, 0)
        self._kv.give(sequence.blocks)
        sequence.blocks = []
