"""Drafted tokens in a simulation: what is guessed is not known there, only how often a guess is right.

Every decode gets as many drafts as the engine allows. Whether the token at a place of an answer can be guessed follows from the
request's id and the place alone, with the ``acceptance`` of the workload, or of its class there, as its probability. So the same
tokens are right under every setting, and settings can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from hashlib import blake2b

from runtime.llm.plan import Chunk
from runtime.request import Sequence

Acceptances = float | Mapping[str, float]
"""The probability that a drafted token is right: of all requests, or by request class; of others it is 0 then."""


def of_class(acceptances: Acceptances, name: str) -> float:
    """The probability for the request class ``name``."""
    return acceptances.get(name, 0.0) if isinstance(acceptances, Mapping) else acceptances


def check_acceptances(acceptances: Acceptances) -> None:
    """Raise ``ValueError`` for a probability that is none."""
    each = acceptances.items() if isinstance(acceptances, Mapping) else [("", acceptances)]
    for name, value in each:
        if not 0 <= value <= 1:
            where = f" of class {name}" if name else ""
            raise ValueError(f"acceptance{where} is {value}; it must be a number from 0 to 1")


class LikelyDrafter:
    """A :class:`runtime.llm.drafts.Drafter` of nameless tokens, for requests in whose answers some can be guessed."""

    def __init__(self, acceptances: Acceptances) -> None:
        self._acceptances = acceptances

    def begin_step(self) -> None:
        """It may guess as much in every step."""

    def draft(self, sequence: Sequence, most: int) -> Seq[int]:
        return (0,) * most if of_class(self._acceptances, sequence.request.request_class) else ()

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept for a sequence."""


def guessable(request_id: str, place: int, acceptance: float) -> bool:
    """Whether the output token at ``place`` (from 0 on) of a request can be guessed: with probability ``acceptance``."""
    digest = blake2b(f"{request_id} {place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53 < acceptance


def right(draft: Chunk, acceptances: Acceptances) -> int:
    """How many of the drafted tokens of ``draft`` are right, from the first on."""
    sequence, count = draft.sequence, len(draft.drafted)
    acceptance = of_class(acceptances, sequence.request.request_class)
    places = range(sequence.generated, sequence.generated + count)
    return next((n for n, at in enumerate(places) if not guessable(sequence.request.id, at, acceptance)), count)
