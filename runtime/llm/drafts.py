"""Drafted tokens: what a sequence may go on with, looked up in what it has said, and verified in one step.

Whoever drafts guesses; a step then computes the guesses behind the last token, samples after each, and keeps what was sampled
as far as it is what was guessed, and one token beyond (Leviathan et al. 2023). Each token is sampled exactly as it would have
been without drafts, so outputs are the same, and so is the distribution of sampled ones. (A guess is kept with the probability
that the model gives it, and what comes instead is drawn from the model's distribution without it: what rejection sampling does
with a proposal that has no other choice.)

:class:`NgramDrafter` needs no second model: it looks for the last tokens further up in prompt and output, and proposes what
followed there (prompt lookup decoding, Saxena 2023). Answers that repeat their prompt, such as edited code, summaries and
extracts, go by several tokens a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import Final, Protocol

from runtime.llm.plan import Token
from runtime.request import Sequence

SHORTEST: Final = 2
"""Tokens that must match before what followed is proposed."""
LONGEST: Final = 8
"""Of several places, the one that matches longest is taken; more tokens than these are not compared."""
_PLACES: Final = 8  # of the latest places that match, how many are compared
_STEP_TOKENS: Final = 8192  # tokens of all sequences that are entered in a step, at most: some 3 ms


class Drafter(Protocol):
    """Guesses how sequences go on. One thread at a time."""

    def begin_step(self) -> None:
        """The guesses asked for from now on are for one step."""
        ...

    def draft(self, sequence: Sequence, most: int) -> Seq[int]:
        """Up to ``most`` (at least 1) tokens that may follow the tokens ``sequence`` has; none if it knows of none."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """``sequence`` has ended."""
        ...


class _Places:
    """Where each pair of neighbouring tokens of one sequence stands; of like pairs the latest first.

    ``latest[pair]`` is where the token behind the latest such pair stands, and ``before[at]`` the same of the pair before the one
    that ``at`` stands behind; 0: there is none. Some 130 bytes a token.
    """

    __slots__ = ("before", "latest", "tokens")

    def __init__(self, prompt: Seq[int]) -> None:
        self.tokens = list(prompt)
        self.latest: dict[int, int] = {}
        self.before = array("q", (0, 0))  # of the first two positions no pair stands in front

    def enter(self, most: int) -> int:
        """Enter up to ``most`` pairs, all but the last one; returns how many. That one is what is looked for."""
        tokens, latest, before = self.tokens, self.latest, self.before
        first = len(before)
        end = min(len(tokens), first + most)
        for at in range(first, end):
            pair = tokens[at - 2] << 32 | tokens[at - 1]
            before.append(latest.get(pair, 0))
            latest[pair] = at
        return max(0, end - first)

    @property
    def complete(self) -> bool:
        """Whether all pairs but the last are entered."""
        return len(self.before) >= len(self.tokens)

    def best(self) -> int:
        """Where the token stands that followed the longest match of the last tokens, of the latest ones; 0 if there is none."""
        tokens, size = self.tokens, len(self.tokens)
        if size <= SHORTEST:
            return 0
        at, best, longest = self.latest.get(tokens[-2] << 32 | tokens[-1], 0), 0, 0
        for _ in range(_PLACES):
            if not at:
                break
            same = SHORTEST
            while same < LONGEST and same < at and tokens[at - 1 - same] == tokens[size - 1 - same]:
                same += 1
            if same > longest:
                best, longest = at, same
                if same == LONGEST:
                    break
            at = self.before[at]
        return best


class NgramDrafter:
    """Proposes what followed the last tokens where they stood before, in the sequence's own prompt and output.

    An output token costs the same few operations however long the sequence is. A long prompt, or one that began before drafts
    were asked for, is entered over several steps, so that no step waits for it, and drafts nothing until then. Requests with a
    repetition penalty are left alone: their distributions depend on tokens that are not sampled yet.
    """

    def __init__(self) -> None:
        self._places: dict[Sequence, _Places] = {}
        self._left = _STEP_TOKENS

    def begin_step(self) -> None:
        self._left = _STEP_TOKENS

    def draft(self, sequence: Sequence, most: int) -> Seq[int]:
        if sequence.request.params.repetition_penalty != 1:
            return ()
        places = self._places.get(sequence)
        if places is None:
            places = self._places[sequence] = _Places(sequence.request.prompt)
        tokens = places.tokens
        tokens += sequence.output[len(tokens) - len(sequence.request.prompt) :]
        self._left -= places.enter(self._left)
        if not places.complete or not (at := places.best()):
            return ()
        drafted = tokens[at : at + most]
        while len(drafted) < most:  # the match runs into what it predicts: a repetition, which goes on
            drafted.append(drafted[len(drafted) - (len(tokens) - at)])
        return drafted

    def forget(self, sequence: Sequence) -> None:
        self._places.pop(sequence, None)


def verified(drafted: Seq[int], sampled: Seq[Token | Exception]) -> int | Exception:
    """How many of the ``drafted`` tokens are right, from the first on. ``sampled``: one more than these, the first behind the
    sequence's last token, each next one behind a drafted token.

    An exception among ``sampled`` (logits that are not finite) ends the count: behind a wrong draft it says nothing of the
    request, and behind a right one it comes again when that token is the last. It is returned if it is the first.
    """
    if len(sampled) != len(drafted) + 1:
        raise ValueError(f"{len(sampled)} tokens were sampled for {len(drafted)} drafted ones; there must be one more")
    if not isinstance(sampled[0], Token):
        return sampled[0]
    right = 0
    for guess, token, behind in zip(drafted, sampled, sampled[1:], strict=False):
        if not (isinstance(token, Token) and token.id == guess and isinstance(behind, Token)):
            break
        right += 1
    return right
