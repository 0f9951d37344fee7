"""Conversations: what turns share, how many there are, when they come."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice, pairwise, takewhile

import pytest

from autotune.workload import Arrival, parse_workload, prompt_ids
from autotune.workload.conversation import Conversations
from runtime.errors import InputError


def conversations(source: Conversations, seed: int, until: float) -> dict[int, list[Arrival]]:
    """Arrivals by conversation, which the first user message identifies."""
    found = defaultdict(list)
    for arrival in takewhile(lambda a: a.time < until, source.generate((0, seed))):
        found[arrival.segments[1][0]].append(arrival)
    return found


def test_a_turn_begins_with_all_of_the_turn_before_and_its_answer() -> None:
    grown = 0
    for turns in conversations(Conversations(rate=2.0), 0, 300).values():
        for before, after in pairwise(turns):
            n = len(before.segments)
            assert after.segments[:n] == before.segments
            assert after.segments[n][1] == before.output_tokens and len(after.segments) == n + 2
            assert after.tenant == before.tenant and after.time >= before.time
            assert prompt_ids(after, 5000)[: before.prompt_tokens] == prompt_ids(before, 5000)
            grown += 1
    assert grown > 200


def test_tenants_share_their_system_prompt_and_nothing_else() -> None:
    arrivals = list(islice(Conversations().generate((0, 1)), 600))
    systems = {a.tenant: a.segments[0] for a in arrivals}
    assert all(a.segments[0] == systems[a.tenant] for a in arrivals)
    assert sorted(n for _, n in systems.values()) == [256, 384, 512, 768] and len(set(systems.values())) == 4
    by_first = {a.segments[1]: a.tenant for a in arrivals}
    tenants = Counter(by_first.values())
    assert tenants["tenant-0"] > tenants["tenant-3"]


@pytest.mark.slow
def test_the_rate_holds_from_the_start() -> None:
    """Twenty runs of a minute: conversations under way at 0 keep the first minute as full as any.

    Turns of a conversation come together, so the count's variance is at most mean_turns × max_turns a conversation.
    """
    source = Conversations(rate=5.0)
    counts = [sum(1 for _ in takewhile(lambda a: a.time < 60, source.generate((0, seed)))) for seed in range(20)]
    expected = 20 * 60 * 5.0
    assert sum(counts) == pytest.approx(expected, abs=5 * (expected * source.max_turns) ** 0.5)
    assert sum(counts[:10]) > 0.8 * expected / 2  # a cold start would give about half


def test_conversations_under_way_at_0_are_those_of_any_later_moment() -> None:
    """As many turns, as long prompts and as far into their conversations in the first seconds as long after."""
    source = Conversations(rate=50.0, think_s=0.5)
    early, late = [], []
    for seed in range(20):
        arrivals = list(takewhile(lambda a: a.time < 22, source.generate((0, seed))))
        early += [a for a in arrivals if a.time < 3]
        late += [a for a in arrivals if a.time >= 19]
    expected = 20 * 3 * 50
    spread = 5 * (expected * source.max_turns) ** 0.5
    assert len(early) == pytest.approx(expected, abs=spread) and len(late) == pytest.approx(expected, abs=spread)
    for mean in (lambda a: a.prompt_tokens, lambda a: len(a.segments)):
        assert sum(map(mean, early)) / len(early) == pytest.approx(sum(map(mean, late)) / len(late), rel=0.1)


def test_the_first_requests_take_no_longer_to_make_at_a_high_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    turns = Conversations._conversation

    def counted(self: Conversations, seed, k: int, *rest) -> Iterator[Arrival]:
        made.append(k)
        return turns(self, seed, k, *rest)

    monkeypatch.setattr(Conversations, "_conversation", counted)
    found = list(parse_workload("shared-prefix").at_rate(1e6).arrivals(0, limit=100))
    assert found[-1].time < 1e-3 and len(made) <= 102
    assert sum(k < 0 for k in made) > 50, "most of them are turns of conversations begun before 0"


def test_another_rate_has_the_same_conversations_and_thinking() -> None:
    def new(rate: float) -> list[list[tuple]]:
        found = conversations(Conversations(rate=rate), 3, 400)
        begun = [turns for turns in found.values() if len(turns[0].segments) == 2]
        begun.sort(key=lambda turns: turns[0].time)
        shape = [[(a.segments, a.output_tokens, a.time - turns[0].time) for a in turns] for turns in begun]
        return [turns for turns in shape if turns][:10]

    for slow, fast in zip(new(1.0), new(4.0), strict=True):
        assert [t[:2] for t in slow] == [t[:2] for t in fast]
        assert [t[2] for t in slow] == pytest.approx([t[2] for t in fast], abs=1e-6)


def test_turns_have_their_mean_and_bound() -> None:
    found = conversations(Conversations(rate=10.0, turns=3.0, max_turns=5, think_s=0.5), 0, 400)
    whole = [len(t) for t in found.values() if len(t[0].segments) == 2 and t[0].time < 380]
    mean = (1 - (2 / 3) ** 5) / (1 / 3)
    assert max(whole) == 5
    assert sum(whole) / len(whole) == pytest.approx(mean, abs=5 * 1.6 / len(whole) ** 0.5)


def test_single_turns_and_options() -> None:
    arrivals = list(
        parse_workload("shared-prefix:turns=1,tenants=6,system=100,user=20,answer=30").arrivals(0, limit=400)
    )
    assert all(len(a.segments) == 2 and a.segments[0][1] == 100 for a in arrivals)
    assert len({a.tenant for a in arrivals}) == 6


@pytest.mark.parametrize(("turns", "most"), [(1, 12), (4, 12), (4.5, 14), (40, 120)])
def test_longer_conversations_are_cut_later(turns: float, most: int) -> None:
    source = parse_workload(f"shared-prefix:turns={turns}").source
    assert isinstance(source, Conversations) and source.max_turns == most
    assert source.mean_turns > 0.94 * turns


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Conversations(rate=0), "rate is 0"),
        (lambda: Conversations(turns=0.9), "turns is 0.9; it must be at least 1"),
        (lambda: Conversations(turns=101.0), "turns is 101.0; it must be at least 1 and at most 100"),
        (lambda: Conversations(max_turns=0), "max_turns is 0"),
        (lambda: Conversations(think_s=-1), "think_s is -1"),
        (lambda: Conversations(system_prompts=()), "at least one tenant"),
        (lambda: Conversations(system_prompts=(5, 0)), "every system prompt is 0"),
    ],
)
def test_impossible_conversations_are_refused(make, message: str) -> None:
    with pytest.raises((ValueError, InputError), match=message):
        make()
