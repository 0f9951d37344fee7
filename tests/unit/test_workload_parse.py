"""Spellings of workloads: every option, the round trip, and errors that list the choices."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.workload import parse_workload
from autotune.workload.options import Options, fraction
from autotune.workload.parse import COMMON, NAMES
from runtime.errors import InputError


def lengths(text: str, n: int = 400) -> list[tuple[int, int]]:
    return [(a.prompt_tokens, a.output_tokens) for a in parse_workload(text).arrivals(0, limit=n)]


def test_common_options() -> None:
    workload = parse_workload(" azure-conv : rate=2 , length=1/8, cap_prompt=256,cap_output=32,limit=9,seed=4")
    assert workload.name == "azure-conv:rate=2,length=1/8,cap_prompt=256,cap_output=32,limit=9,seed=4"
    assert workload.rate == pytest.approx(2)
    assert (workload.length_scale, workload.cap_prompt, workload.cap_output) == (0.125, 256, 32)
    assert (workload.limit, workload.seed) == (9, 4)
    assert parse_workload("azure-conv:time=2").rate == pytest.approx(parse_workload("azure-conv").rate / 2)


def test_scales_read_as_they_are_written() -> None:
    assert [fraction(s) for s in (1.0, 0.125, 0.0625, 0.3)] == ["1", "1/8", "1/16", "3/10"]
    for scale in (0.125, 2.0, 3.7e-5):
        assert Options({"length": fraction(scale)}).number("length", None) == scale


def test_prompt_and_output_options() -> None:
    assert set(lengths("poisson")) == {(512, 128)}
    uniform = lengths("fixed:prompt=10-12,output=3")
    assert {p for p, _ in uniform} == {10, 11, 12} and {o for _, o in uniform} == {3}
    prompts = [p for p, _ in lengths("gamma:cv=3,prompt=500~0.5", 4000)]
    assert sum(prompts) / len(prompts) == pytest.approx(500, rel=5 * 0.5 / 4000**0.5)


def test_fitted_lengths_under_another_process() -> None:
    assert lengths("poisson:lengths=azure-code") == lengths("azure-code")


@pytest.mark.parametrize(
    "text",
    [
        "poisson",
        "gamma:cv=4,prompt=64~1",
        "shared-prefix:tenants=2,think=3",
        "azure-code:rate=1/3,seed=2",
        "fixed:rate=3",
    ],
)
def test_name_parses_to_the_same_requests(text: str) -> None:
    workload = parse_workload(text)
    assert list(parse_workload(workload.name).arrivals(0, limit=60)) == list(workload.arrivals(0, limit=60))


def test_paths_may_hold_commas_colons_and_dots(tmp_path: Path) -> None:
    path = tmp_path / "my: trace, v1.2.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,5,1\n2,6,1\n")
    for text in (f"{path},length=2", f"azure-conv:{path},length=2", f"azure-code: {path} ,length=2"):
        workload = parse_workload(text)
        assert [a.prompt_tokens for a in workload.arrivals(0)] == [10, 12]
        assert parse_workload(workload.name).name == workload.name
    assert parse_workload(str(path)).description == "replay of 2 requests of my: trace, v1.2.csv"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", f"it names nothing; the workloads are {', '.join(NAMES)}, or a trace file"),
        ("azure-chat", f"'azure-chat' is no workload and no file; the workloads are {', '.join(NAMES)}"),
        ("nope:rate=2", "'nope:rate=2' is no workload"),
        ("n" * 300, f"'{'n' * 300}' is no workload and no file; the workloads are {', '.join(NAMES)}"),
        ("none.csv,rate=2", "'none.csv' is no workload and no file"),
        ("/dev/null", "'/dev/null' is a pipe or a device; a trace must be a regular file, unless its format is named"),
        ("poisson,rate=2", 'options follow a colon; write "poisson:rate=2"'),
        ("mooncake", "mooncake replays a file; write mooncake:PATH"),
        ("mooncake:rate=2", "mooncake replays a file; write mooncake:PATH"),
        ("poisson:", "nothing follows the colon; the options are rate, time"),
        ("azure-conv:", "or a trace file"),
        ("poisson:512", "'512' is no option=value, and poisson replays no file; its options are rate"),
        ("poisson:cv=2", f"'cv' is no option of it; the options are {', '.join(COMMON)}, prompt, output, lengths"),
        ("azure-conv:prompt=9", "'prompt' is no option of it"),
        ("poisson:rate=2,rate=3", "rate is given twice"),
        ("poisson:rate=", "rate has no value; write rate=…"),
        ("poisson:rate=2,", "'' is no option of it"),
        ("poisson:rate=2,time=2", "rate and time are both given; give one"),
        ("poisson:rate=fast", "rate is 'fast'; it must be a number from 1e-09 to 1e+09, such as 0.5 or 1/8"),
        ("poisson:rate=0", "rate is '0'"),
        ("poisson:rate=1/0", "rate is '1/0'"),
        ("poisson:rate=inf", "rate is 'inf'"),
        ("poisson:length=-1", "length is '-1'"),
        ("poisson:acceptance=-1", "acceptance is '-1'; it must be a number from 0 to 1"),
        ("poisson:acceptance=1.5", "acceptance is '1.5'; it must be a number from 0 to 1"),
        ("poisson:limit=0", "limit is '0'; it must be a whole number from 1 to 1000000000"),
        ("poisson:seed=-1", "seed is '-1'; it must be a whole number from 0 to 9223372036854775807"),
        ("poisson:cap_prompt=1e3", "cap_prompt is '1e3'"),
        ("poisson:prompt=long", "prompt is 'long'; it must be tokens: 512 (always), 128-1024 (uniform)"),
        ("poisson:output=9-3", "output is '9-3'"),
        ("poisson:output=9~x", "output is '9~x'"),
        ("poisson:lengths=azure", "lengths is 'azure'; it must be one of azure-conv, azure-code"),
        ("poisson:lengths=azure-conv,output=4", "output and lengths are both given"),
        ("gamma:cv=0", "cv is '0'"),
        ("shared-prefix:turns=0.5", "turns is 0.5; it must be at least 1"),
        ("shared-prefix:tenants=0", "tenants is '0'"),
        ("gamma:cv=1e-200", "cv is '1e-200'; it must be a number from 0.001 to 100"),
        ("gamma:cv=1e200", "cv is '1e200'; it must be a number from 0.001 to 100"),
        ("poisson:prompt=512~1e200", "prompt is '512~1e200'; it must be tokens: 512 (always)"),
        ("poisson:prompt=512~1e-200", "prompt is '512~1e-200'"),
        ("poisson:prompt=1e300~1", "prompt is '1e300~1'"),
        ("poisson:prompt=100000000000000000000", "at most 100); at most 1000000000 tokens"),
        ("poisson:output=1-100000000000", "output is '1-100000000000'"),
        ("azure-conv:length=1e308", "length is '1e308'; it must be a number from 1e-09 to 1e+09"),
        ("azure-conv:time=1e-300", "time is '1e-300'"),
        ("azure-conv:rate=1/1e300", "rate is '1/1e300'"),
        ("azure-conv:cap_output=10000000000", "cap_output is '10000000000'; it must be a whole number from 1 to "),
        ("poisson:limit=" + "9" * 5000, "it must be a whole number from 1 to 1000000000"),
        ("poisson:rate=1_000", "rate is '1_000'; it must be a number"),
        ("poisson:limit=1_000", "limit is '1_000'; it must be a whole number"),
        ("poisson:prompt=1_000", "prompt is '1_000'"),
        ("shared-prefix:turns=1e300", "turns is '1e300'; it must be a number"),
        ("shared-prefix:turns=1e6", "turns is 1000000.0; it must be at least 1 and at most 100"),
        ("shared-prefix:tenants=1000000000", "tenants is '1000000000'; it must be a whole number from 1 to 10000"),
    ],
)
def test_errors_quote_the_text_and_say_what_is_allowed(text: str, complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_workload(text)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith(f'workload "{text}": ')


@pytest.mark.parametrize(
    "text",
    [
        "gamma:cv=0.001",
        "gamma:cv=100",
        "poisson:prompt=1000000000~100,output=1-1000000000",
        "poisson:prompt=1000000000,length=1e9,time=1e-9",
        "azure-code:length=1e-9,time=1e9",
        "shared-prefix:turns=100,think=1e-9,user=1e9,answer=1e-9",
        "shared-prefix:tenants=10000,think=1e9,length=1e9",
    ],
)
def test_what_is_read_can_be_generated(text: str) -> None:
    for arrival in parse_workload(text).arrivals(0, limit=20):
        assert arrival.prompt_tokens >= 1 and arrival.output_tokens >= 1 and 0 <= arrival.time < 1e20


@given(
    st.text(max_size=40)
    | st.lists(st.sampled_from(["poisson", ":", ",", "rate=", "1/2", "~", "-", "azure-conv"])).map("".join)
)
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        assert parse_workload(text).rate > 0
    except InputError as error:
        assert text in str(error)
