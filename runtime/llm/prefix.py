"""Names for KV blocks by content: a chain of hashes over the full blocks of a token sequence.

The hash of a block covers the hash of the block before it, so equal hashes mean equal tokens from the very first one on,
and a prompt's longest cached prefix is found by walking its chain (the scheme of vLLM's automatic prefix caching).
A collision would hand one client another's KV, so the hash is a cryptographic one: BLAKE2b (RFC 7693), 128 bits. Whoever
chooses both prompts needs some 2^64 of them to find one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import Final

from runtime.request import Request, TokenHasher
from runtime.request import Sequence as RunningSequence

HASH_BYTES: Final = 16
_TOKEN: Final = "I"  # C unsigned int: four bytes wherever CPython runs
_WIDTH: Final = array(_TOKEN).itemsize


def block_hashes(tokens: Sequence[int], block_size: int, salt: bytes = b"") -> tuple[int, ...]:
    """One 128-bit hash for each full block of ``tokens``; a last block that is not full has none.

    ``salt`` (any bytes) keeps caches apart: chains that began with different salts never meet. Raises ``ValueError`` if
    ``block_size`` is below 1 and ``OverflowError`` if a token id does not fit in 32 bits.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    return tuple(_chain(_root(salt), tokens, block_size))


def token_hasher(block_size: int, salt: Callable[[Request], bytes] = lambda request: b"") -> TokenHasher:
    """A hasher that extends ``sequence.hashes`` over prompt and output, so that the next turn finds this turn's answer.

    ``salt`` gives a request's salt, and must be the one its ``block_hashes`` were made with. Called when a sequence stops
    decoding (finish or preemption), not once a step; its work follows the blocks that are new.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")

    def extend(sequence: RunningSequence) -> None:
        request, known = sequence.request, sequence.hashes
        done, prompt = len(known) * block_size, len(request.prompt)
        if done + block_size > prompt + len(sequence.output):
            return
        new = sequence.output[done - prompt :] if done >= prompt else [*request.prompt[done:], *sequence.output]
        parent = known[-1].to_bytes(HASH_BYTES, "little") if known else _root(salt(request))
        known.extend(_chain(parent, new, block_size))

    return extend


class ComingPrefixes:
    """The blocks that prompts which wait, or are in progress, are going to fill, by hash: who shares them has less to compute.

    At most ``most`` blocks are remembered, as many as the KV pool has: more would not be found again.
    """

    __slots__ = ("_counts", "_hashes_of", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: dict[Hashable, int] = {}
        self._hashes_of: dict[RunningSequence, Sequence[Hashable]] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, digest: Hashable) -> bool:
        return digest in self._counts

    def add(self, sequence: RunningSequence, hashes: Sequence[Hashable]) -> int:
        """``sequence`` has been queued, and is going to fill blocks with ``hashes``, if nobody has before. Returns how many of
        them, from the first on, others were going to fill."""
        counts, shared = self._counts, 0
        for digest in hashes:
            if digest not in counts:
                break
            shared += 1
        if len(counts) + len(hashes) <= self._most:
            self._hashes_of[sequence] = hashes
            for digest in hashes:
                counts[digest] = counts.get(digest, 0) + 1
        return shared

    def drop(self, sequence: RunningSequence) -> None:
        """The prompt of ``sequence`` is computed, or will not be."""
        counts = self._counts
        for digest in self._hashes_of.pop(sequence, ()):
            if counts[digest] == 1:
                del counts[digest]
            else:
                counts[digest] -= 1

    def check_integrity(self, sequences: Sequence[RunningSequence]) -> None:
        """Raise AssertionError unless all that is remembered is of ``sequences``, and counted right. For tests."""
        assert self._hashes_of.keys() <= set(sequences), "blocks are to come from who computes no prompt"
        counts: dict[Hashable, int] = {}
        for hashes in self._hashes_of.values():
            for digest in hashes:
                counts[digest] = counts.get(digest, 0) + 1
        assert counts == self._counts, "wrong count of blocks to come"


def _root(salt: bytes) -> bytes:
    return blake2b(salt, digest_size=HASH_BYTES, person=b"kv-block-root").digest()


def _chain(parent: bytes, tokens: Sequence[int], block_size: int) -> list[int]:
    """The hashes of the full blocks of ``tokens`` behind the block called ``parent``."""
    full = len(tokens) // block_size
    data = array(_TOKEN, tokens[: full * block_size]).tobytes()
    width = block_size * _WIDTH
    hashes: list[int] = []
    for at in range(0, len(data), width):
        parent = blake2b(parent + data[at : at + width], digest_size=HASH_BYTES).digest()
        hashes.append(int.from_bytes(parent, "little"))
    return hashes
