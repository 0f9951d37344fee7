"""Drafted tokens in a simulation: what is guessed is not known there, only how often a guess is right.

Every decode gets as many drafts as the engine allows. Whether the token at a place of an answer can be guessed follows from the
request's id and the place alone, with the workload's ``acceptance`` as its probability. So the same tokens are right under every
setting, and settings can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from hashlib import blake2b

from runtime.llm.plan import Chunk
from runtime.request import Sequence


class LikelyDrafter:
    """A :class:`runtime.llm.drafts.Drafter` of nameless tokens."""

    def begin_step(self) -> None:
        """It may guess as much in every step."""

    def draft(self, sequence: Sequence, most: int) -> Seq[int]:
        return (0,) * most

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept for a sequence."""


def guessable(request_id: str, place: int, acceptance: float) -> bool:
    """Whether the output token at ``place`` (from 0 on) of a request can be guessed: with probability ``acceptance``."""
    digest = blake2b(f"{request_id} {place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53 < acceptance


def right(draft: Chunk, acceptance: float) -> int:
    """How many of the drafted tokens of ``draft`` are right, from the first on."""
    sequence, count = draft.sequence, len(draft.drafted)
    places = range(sequence.generated, sequence.generated + count)
    return next((n for n, at in enumerate(places) if not guessable(sequence.request.id, at, acceptance)), count)
