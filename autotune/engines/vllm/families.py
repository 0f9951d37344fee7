"""What one HTTP request stands for where it asks for several prompts or answers: requests of vLLM's, which are rejected together.

vLLM's API server asks its engine for each of them by itself, and their ids tell which belong together. Its client is told that
all of what it asked for was rejected as soon as one is, so none of it is to go on.

A client may choose the id, and give it to several of its HTTP requests: one that it tries again, or those of one trace. So two
requests belong together only if little time lies between them, and if none of them is a prompt that the others have already.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Final, NamedTuple

from runtime.request import Sequence

_OF_COMPLETIONS: Final = re.compile(r"(?:\d+_)?(cmpl-[0-9a-f]{16,32})-(\d+)-([0-9a-f]{8})")
"""The ids of what ``/v1/completions`` asks the engine for: one for each of its prompts, and for each of their ``n`` answers."""
_OF_ANSWERS: Final = re.compile(r"\d+_(.+-[0-9a-f]{8})")
"""The ids of the ``n`` answers to one prompt, by whatever endpoint."""
_TOGETHER_S: Final = 1.0  # at most between two requests of one HTTP request; and from its refusal to those to come


class Place(NamedTuple):
    """Where a request stands in its HTTP request: what the ids of all of it have in common, the number of the prompt, and the
    characters that vLLM has drawn for that prompt."""

    family: str
    prompt: str = ""
    drawn: str = ""


def place_of(name: str) -> Place | None:
    """That of the request with this id; None for a request of its own, as far as its id says. An id that is not like one of
    vLLM's own tells answers alone."""
    if (found := _OF_COMPLETIONS.fullmatch(name)) is not None:
        return Place(*found.groups())
    return None if (found := _OF_ANSWERS.fullmatch(name)) is None else Place(found[1])


class Refusal(NamedTuple):
    """Why a family was refused: by its short name, for people, and in how many seconds it may be tried again."""

    reason: str
    why: str
    retry_after: float | None


class _Family:
    """What came of one HTTP request, as far as can be told. ``heard``: when the last of it came, or it was refused."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: dict[Sequence, None] = {}
        self.drawn: dict[str, str] = {}  # for each of its prompts
        self.refusal: Refusal | None = None
        self.heard = 0.0

    def takes(self, place: Place, now: float) -> bool:
        """Whether a request that came ``now`` may be of the same HTTP request."""
        return now - self.heard <= _TOGETHER_S and self.drawn.get(place.prompt, place.drawn) == place.drawn


class Families:
    """Those of the requests that a scheduler has."""

    def __init__(self) -> None:
        self._newest: dict[str, _Family] = {}  # of each name, for what of it is still to come
        self._of: dict[Sequence, _Family] = {}
        self._refused: deque[_Family] = deque()
        self.doomed: list[tuple[Sequence, Refusal]] = []
        """Members of families that were refused, which are to be rejected, and why."""

    def joined(self, name: str, sequence: Sequence, now: float) -> None:
        """vLLM has been given ``sequence`` by the ``name``. ``now``: when its API server was; a step may have lain between."""
        if (place := place_of(name)) is None:
            return
        family = self._newest.get(place.family)
        if family is None or not family.takes(place, now):
            family = self._newest[place.family] = _Family(place.family)
        family.heard = now
        family.drawn[place.prompt] = place.drawn
        family.members[sequence] = None
        self._of[sequence] = family
        if family.refusal is not None:
            self.doomed.append((sequence, family.refusal))

    def left(self, sequence: Sequence) -> None:
        """It has ended, in whatever way."""
        if self._of and (family := self._of.pop(sequence, None)) is not None:
            del family.members[sequence]
            if not family.members and family.refusal is None:
                self._forget(family)

    def refuse(self, sequence: Sequence, refusal: Refusal, now: float) -> None:
        """``sequence`` is being rejected: all others of its family are doomed, those too that are still to come. They are not
        ended at once, since a step may be being planned."""
        while self._refused and now - self._refused[0].heard > _TOGETHER_S:
            self._forget(self._refused.popleft())
        family = self._of.get(sequence)
        if family is None or family.refusal is not None:
            return
        family.refusal, family.heard = refusal, now
        self._refused.append(family)
        self.doomed += [(one, refusal) for one in family.members if one is not sequence]

    def _forget(self, family: _Family) -> None:
        if self._newest.get(family.name) is family:
            del self._newest[family.name]

    def take_doomed(self) -> list[tuple[Sequence, Refusal]]:
        """Those to be rejected since the last call, and why."""
        doomed, self.doomed = self.doomed, []
        return doomed
