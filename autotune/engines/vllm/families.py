"""What one HTTP request stands for where it asks for several prompts or answers: requests of vLLM's, which are rejected together.

vLLM's API server asks its engine for each of them by itself, and their ids tell which belong together. Its client is told that
all of what it asked for was rejected as soon as one is, so none of it is to go on.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from runtime.request import Sequence

_OF_COMPLETIONS: Final = re.compile(r"(?:\d+_)?(cmpl-[0-9a-f]{16,32})-\d+-[0-9a-f]{8}")
"""The ids of what ``/v1/completions`` asks the engine for: one for each of its prompts, and for each of their ``n`` answers."""
_OF_ANSWERS: Final = re.compile(r"\d+_(.+-[0-9a-f]{8})")
"""The ids of the ``n`` answers to one prompt, by whatever endpoint."""
_REMEMBERED: Final = 1024  # families that were refused, for what of them is still to come


def family_of(name: str) -> str | None:
    """What the requests have in common that one HTTP request stands for; None for a request of its own, as far as its id says.
    vLLM adds random characters to each id, but a client may give two of its requests one id: then only answers are told."""
    found = _OF_COMPLETIONS.fullmatch(name) or _OF_ANSWERS.fullmatch(name)
    return None if found is None else found[1]


class Refusal(NamedTuple):
    """Why a family was refused: by its short name, for people, and in how many seconds it may be tried again."""

    reason: str
    why: str
    retry_after: float | None


class Families:
    """Those of the requests that a scheduler has."""

    def __init__(self) -> None:
        self._members: dict[str, list[Sequence]] = {}
        self._refused: dict[str, Refusal] = {}
        self.doomed: list[Sequence] = []
        """Members of families that were refused, which are to be rejected."""

    def joined(self, name: str, sequence: Sequence) -> None:
        """vLLM has been given ``sequence`` by the ``name``."""
        if (family := family_of(name)) is not None:
            self._members.setdefault(family, []).append(sequence)
            if family in self._refused:
                self.doomed.append(sequence)

    def left(self, name: str, sequence: Sequence) -> None:
        """It has ended, in whatever way."""
        if self._members and (family := family_of(name)) is not None:
            kept = [one for one in self._members.get(family, ()) if one is not sequence]
            if kept:
                self._members[family] = kept
            else:
                self._members.pop(family, None)

    def refuse(self, name: str, refusal: Refusal) -> None:
        """The request of that ``name`` was rejected: all others of its family are doomed, those too that are still to come. They
        are not ended at once, since a step may be being planned."""
        family = family_of(name)
        if family is None or family in self._refused:
            return
        self._refused[family] = refusal
        if len(self._refused) > _REMEMBERED:
            del self._refused[next(iter(self._refused))]
        self.doomed += self._members.get(family, ())

    def take_doomed(self) -> list[tuple[Sequence, Refusal]]:
        """Those to be rejected since the last call, and why."""
        doomed, self.doomed = self.doomed, []
        known = [(one, self._refused.get(family_of(one.data.request_id) or "")) for one in doomed]
        return [(one, refusal) for one, refusal in known if refusal is not None]
