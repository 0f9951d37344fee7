"""Drafts looked up by n-grams: what is proposed, and what it costs to know it."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.llm.drafts import LONGEST, SHORTEST, NgramDrafter
from runtime.request import Request, SamplingParams, Sequence


def sequence(prompt: Seq[int], output: Seq[int] = (), **params: float) -> Sequence:
    made = Sequence(Request("r", tuple(prompt), SamplingParams(**params), 100, 0.0))  # type: ignore[arg-type]
    made.output.extend(output)
    return made


def drafted(prompt: Seq[int], output: Seq[int] = (), most: int = 4, **params: float) -> list[int]:
    drafter = NgramDrafter()
    drafter.begin_step()
    return list(drafter.draft(sequence(prompt, output, **params), most))


def by_hand(tokens: Seq[int], most: int) -> list[int]:
    """By looking everywhere: of the eight latest places where the last two tokens stand, the one that matches longest, the latest
    of those; and what would follow if the sequence went on as from there."""
    size = len(tokens)
    places = [at for at in range(SHORTEST, size) if list(tokens[at - SHORTEST : at]) == list(tokens[size - SHORTEST :])]
    best, longest = 0, 0
    for at in reversed(places[-8:]):
        same = 0
        while same < min(LONGEST, at) and tokens[at - 1 - same] == tokens[size - 1 - same]:
            same += 1
        if same > longest:
            best, longest = at, same
    if not best:
        return []
    going_on = list(tokens)
    for step in range(most):
        going_on.append(going_on[best + step])
    return going_on[size:]


@pytest.mark.parametrize(
    ("prompt", "output", "most", "wanted"),
    [
        ([1, 2, 3, 4, 5], [9, 1, 2], 3, [3, 4, 5]),
        ([1, 2, 3, 4, 5], [9, 1, 2], 1, [3]),
        ([1, 2, 3, 4, 5], [9, 2], 3, []),  # one token alone says nothing
        ([1, 2, 3], [], 3, []),
        ([1], [], 3, []),
        ([1, 2], [], 3, []),
        ([7, 7, 7], [], 3, [7, 7, 7]),
        ([1, 2, 1, 2], [], 5, [1, 2, 1, 2, 1]),  # a repetition goes on beyond what there is
        ([1, 2, 3, 8, 1, 2, 4], [1, 2], 1, [4]),  # of two alike the later one
        ([6, 1, 2, 3, 8, 1, 2, 4], [6, 1, 2], 2, [3, 8]),  # of two the longer match
    ],
)
def test_it_proposes_what_followed_before(prompt: list[int], output: list[int], most: int, wanted: list[int]) -> None:
    assert drafted(prompt, output, most) == wanted == by_hand([*prompt, *output], most)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=80), st.data())
def test_it_finds_what_looking_everywhere_finds_whenever_it_is_asked(tokens: list[int], data: st.DataObject) -> None:
    """However tokens come: one by one, several at once, and not asked for in between."""
    split = data.draw(st.integers(1, len(tokens)))
    running = sequence(tokens[:split])
    drafter = NgramDrafter()
    rest = tokens[split:]
    while True:
        if data.draw(st.booleans()):
            most = data.draw(st.integers(1, 6))
            drafter.begin_step()
            assert list(drafter.draft(running, most)) == by_hand([*running.request.prompt, *running.output], most)
        if not rest:
            break
        count = data.draw(st.integers(1, len(rest)))
        running.output += rest[:count]
        rest = rest[count:]


def test_a_request_with_a_repetition_penalty_is_left_alone() -> None:
    assert drafted([7, 7, 7, 7]) and not drafted([7, 7, 7, 7], repetition_penalty=1.1)


def test_sequences_do_not_see_each_other_and_are_forgotten() -> None:
    drafter = NgramDrafter()
    first, second = sequence([1, 2, 3, 4, 1, 2]), sequence([1, 2])
    drafter.begin_step()
    assert list(drafter.draft(first, 2)) == [3, 4] and not drafter.draft(second, 2)
    assert len(drafter._places) == 2
    drafter.forget(first)
    drafter.forget(first)
    drafter.forget(second)
    assert not drafter._places


def test_a_long_prompt_is_entered_over_several_steps() -> None:
    dice = random.Random(1)
    prompt = [dice.randrange(50_000) for _ in range(20_000)]
    running, drafter = sequence([*prompt, *prompt[100:110]]), NgramDrafter()
    found = []
    for _ in range(4):
        drafter.begin_step()
        found.append(list(drafter.draft(running, 3)))
    assert found == [[], [], prompt[110:113], prompt[110:113]]


def test_a_token_costs_the_same_few_operations_however_long_the_sequence_is() -> None:
    """Counted by what is entered: each pair once, whatever was asked in between."""

    class Counting(NgramDrafter):
        entered = 0

        def draft(self, sequence: Sequence, most: int) -> Seq[int]:
            before = self._left
            found = super().draft(sequence, most)
            self.entered += before - self._left
            return found

    running, drafter = sequence(range(1000)), Counting()
    for token in range(500):
        running.output.append(token)
        drafter.begin_step()
        drafter.draft(running, 4)
    assert drafter.entered == 1000 + 500 - 2  # all pairs but the last, which is looked for
