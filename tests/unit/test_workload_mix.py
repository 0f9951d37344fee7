"""Several workloads as one: classes, shares, and requests that do not depend on what else is in the mix."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from autotune.workload import (
    at_length_scale,
    length_scale_as_data,
    length_scale_in_words,
    named_options,
    parse_workload,
)
from runtime.errors import InputError

TWO = "chat=azure-conv@0.8+batch=poisson:prompt=900,output=100@0.2"


def test_each_class_has_its_share_and_its_lengths() -> None:
    workload = parse_workload(TWO).at_rate(50)
    arrivals = list(workload.arrivals(1, limit=10_000))
    counts = Counter(a.request_class for a in arrivals)
    assert set(counts) == {"chat", "batch"} and counts["chat"] == pytest.approx(8000, abs=400)
    assert {(a.prompt_tokens, a.output_tokens) for a in arrivals if a.request_class == "batch"} == {(900, 100)}
    assert all(a.time <= b.time for a, b in pairwise(arrivals))
    assert len(arrivals) / arrivals[-1].time == pytest.approx(50, rel=0.1) and workload.rate == 50


def test_the_spelling_reads_back_to_the_same_requests() -> None:
    spaced = parse_workload(" chat = azure-conv @80% + batch=poisson : prompt=900 , output=100@1/5 ")
    assert spaced.name == "chat=azure-conv@80%+batch=poisson:prompt=900,output=100@1/5"
    first, again = (list(parse_workload(text).arrivals(3, limit=300)) for text in (TWO, spaced.name))
    assert first == again == list(spaced.arrivals(3, limit=300))


def test_a_spelling_may_be_longer_than_the_name_of_a_file() -> None:
    names = [f"class-{number}" for number in range(10)]
    text = "+".join(f"{name}=poisson:prompt=900,output=100@0.1" for name in names)
    workload = parse_workload(text)
    assert len(text) > 255 and {a.request_class for a in workload.arrivals(0, limit=300)} == {*names}


def test_the_requests_of_a_class_are_the_same_whatever_else_is_in_the_mix() -> None:
    """At the same rate of its own: alone, beside another class, and beside another that comes first."""
    alone = list(parse_workload("chat=azure-conv").at_rate(8).arrivals(5, limit=200))
    assert {a.request_class for a in alone} == {"chat"}
    for text in (TWO, "batch=fixed@0.2+chat=azure-conv@0.8"):
        mixed = [a for a in parse_workload(text).at_rate(10).arrivals(5, limit=400) if a.request_class == "chat"]
        together = list(zip(mixed, alone, strict=False))
        assert len(together) > 150
        assert all(a._replace(time=b.time) == b and a.time == pytest.approx(b.time) for a, b in together)


def test_a_mix_has_the_rate_at_which_its_first_part_comes_at_its_own() -> None:
    assert parse_workload(TWO).rate == pytest.approx(parse_workload("azure-conv").rate / 0.8)


def test_tenants_are_those_of_the_parts_and_length_scales_multiply() -> None:
    workload = parse_workload("chat=shared-prefix@1/2+batch=fixed:prompt=800,output=80,length=1/4@1/2").at_rate(4)
    arrivals = list(workload.scaled(length=0.5).arrivals(0, limit=200))
    assert {a.tenant for a in arrivals if a.request_class == "chat"} >= {"tenant-0", "tenant-1"}
    assert {(a.prompt_tokens, a.output_tokens) for a in arrivals if a.request_class == "batch"} == {(100, 10)}
    assert named_options(workload.name) == set(), "what its parts say of lengths is not the scale of the whole"


def test_a_mix_ends_with_the_first_part_that_ends(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{n},10,2\n" for n in range(50))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    workload = parse_workload(f"chat={trace}@1/2+batch=poisson@1/2")
    arrivals = list(workload.arrivals(0))
    assert workload.finite and arrivals[-1].request_class == "chat"
    assert Counter(a.request_class for a in arrivals)["chat"] == 50


def test_of_a_mix_the_share_of_its_traces_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{n // 5},10,2\n" for n in range(50)))
    for text, share in (
        (f"a={trace}@0.3+b=poisson@0.7", 0.3),
        (f"a={trace}@0.3+b={trace},bin=0@0.7", 1.0),
        ("a=fixed", 0.0),
    ):
        assert parse_workload(text).replayed == pytest.approx(share)
    assert parse_workload("a=fixed").repeated(limit=20) == 1, "no seed changes it"


@pytest.mark.parametrize("rows", ["5,10,2\n5,10,2\n", "5,10,2\n"])
def test_a_trace_of_one_time_is_named_with_its_class(tmp_path: Path, rows: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    for text in (f"a={trace}@0.5+b=poisson@0.5", f"b=poisson@0.5+a={trace}@0.5", f"a={trace}@1"):
        with pytest.raises(
            InputError, match=r"class a: .*trace\.csv: all requests have one time; no rate can be given"
        ):
            parse_workload(text)


def test_each_class_says_how_often_a_draft_is_right() -> None:
    mix = parse_workload("chat=poisson:acceptance=0.5@0.8+batch=poisson@0.2").at_rate(3.0)
    assert mix.acceptances == {"chat": 0.5, "batch": 0.0} and mix.may_draft
    assert not parse_workload("chat=poisson@1").may_draft
    alone = parse_workload("poisson:acceptance=0.5")
    assert alone.acceptances == 0.5 and alone.may_draft and not parse_workload("poisson").may_draft


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chat=azure-conv@0.8+batch=azure-code@0.1", "the shares add up to 0.9; they must add up to 1"),
        ("chat=azure-conv@0.8+chat=azure-code@0.2", "class chat is given twice"),
        ("chat=azure-conv@2+batch=azure-code@0.2", "class chat: share is '2'; it must be a number from 1e-06 to 1"),
        ("chat=azure-conv@x", "class chat: share is 'x'; it must be a number from 1e-06 to 1, such as 0.8, 80% or 4/5"),
        ("chat=azure-conv@0.8+batch=azure-code", "class batch has no share; write batch=azure-code@0.2"),
        ("chat=azure-conv@0.8+azure-code@0.2", "'azure-code@0.2' is no class; write CLASS=WORKLOAD@SHARE"),
        ("chat=nope@1", "class chat: 'nope' is no workload and no file; the workloads are azure-conv"),
        ("chat=poisson:rate=2@1", "class chat: rate is of all classes together, which --rate sets; drop it here"),
        ("chat=poisson:acceptance=1.5@1", "class chat: acceptance is '1.5'; it must be a number from 0 to 1"),
        ("chat=poisson:promt=2@1", "class chat: 'promt' is no option of it; the options are rate"),
        ("chat=poisson@1+", "nothing follows the last +"),
        ("rate=2", "it names nothing; the workloads are"),
    ],
)
def test_a_mix_that_cannot_be_read_says_why(text: str, message: str) -> None:
    with pytest.raises(InputError) as found:
        parse_workload(text)
    assert f'workload "{text}": ' in str(found.value) and message in str(found.value)


def test_a_scale_goes_to_parts_that_bring_none() -> None:
    one, other = "poisson:prompt=512,output=64", "poisson:prompt=512,output=64,length=1/8"

    def prompts(text: str, scale: float) -> dict[str, int]:
        return {
            a.request_class: a.prompt_tokens for a in at_length_scale(parse_workload(text), scale).arrivals(0, limit=40)
        }

    assert prompts(f"a={one}@0.5+b={other}@0.5", 1 / 4) == {"a": 128, "b": 64}
    assert prompts(f"a={other}@0.5+b={other}@0.5", 1 / 4) == {"a": 64, "b": 64}
    assert prompts(f"a={one}@0.5+b={one}@0.5", 1 / 4) == {"a": 128, "b": 128}
    assert prompts("poisson:prompt=512,output=64,length=1", 1 / 4) == {"default": 512}


@pytest.mark.parametrize(
    ("text", "one", "each"),
    [
        ("fixed", 1 / 8, {}),
        ("fixed:length=1/4", 1 / 4, {}),
        ("a=fixed@0.5+b=fixed@0.5", 1 / 8, {"a": 1 / 8, "b": 1 / 8}),
        ("a=fixed:length=1/4@0.5+b=fixed@0.5", None, {"a": 1 / 4, "b": 1 / 8}),
        ("a=fixed:length=1/4@0.5+b=fixed:length=1@0.5", None, {"a": 1 / 4, "b": 1}),
        ("a=fixed:length=1/4@0.5+b=fixed:length=1/4@0.5", 1 / 4, {"a": 1 / 4, "b": 1 / 4}),
    ],
)
def test_a_mix_has_one_length_scale_or_says_those_of_its_parts(
    text: str, one: float | None, each: dict[str, float]
) -> None:
    workload = at_length_scale(parse_workload(text), 1 / 8)
    assert length_scale_as_data(workload) == {"length_scale": one, "length_scales": each}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fixed", "lengths × 1/8"),
        ("fixed:length=1/4", "lengths × 1/4"),
        ("fixed:length=1", ""),
        ("a=fixed@0.5+b=fixed@0.5", "lengths × 1/8"),
        ("a=fixed:length=1/4@0.5+b=fixed@0.5", "lengths of b × 1/8"),
        ("a=fixed:length=1@0.5+b=fixed@0.25+c=fixed@0.25", "lengths of b and c × 1/8"),
        ("a=fixed:length=1/4@0.5+b=fixed:length=1/2@0.5", ""),
    ],
)
def test_what_was_scaled_is_said(text: str, words: str) -> None:
    """A part that brings a scale of its own has it in its spelling."""
    assert length_scale_in_words(at_length_scale(parse_workload(text), 1 / 8)) == words
