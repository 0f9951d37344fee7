"""Trace readers: what they read, how it is replayed, and one complaint for each way a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.workload import Arrival, parse_workload, prompt_ids
from autotune.workload.readers import guess_reader, read_azure, read_mooncake
from autotune.workload.traces import Trace, TraceRow, guess_bin
from runtime.errors import InputError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
CSV = HEADER + (
    "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n\n2023-11-16 18:17:05.9799600,110,27\n"
)


def mooncake(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def row(timestamp: float = 0, input_length: int = 600, output_length: int = 5, hash_ids=(1, 2), **more) -> dict:
    ids = {} if hash_ids is None else {"hash_ids": list(hash_ids)}
    return {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, **ids, **more}


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str | bytes, name: str = "trace.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_azure_csv_is_read_and_replayed(write) -> None:
    path = write(CSV)
    arrivals = list(parse_workload(f"azure-conv:{path}").arrivals(0))
    assert [a.time for a in arrivals] == pytest.approx([0, 0.052, 2.0], abs=1e-5)
    assert [(a.prompt_tokens, a.output_tokens) for a in arrivals] == [(4808, 10), (3180, 8), (110, 27)]
    assert len({a.segments[0][0] for a in arrivals}) == 3


def test_a_csv_may_have_a_bom_windows_ends_more_columns_zones_and_plain_seconds(write) -> None:
    text = "\ufeffGeneratedTokens,TIMESTAMP,tenant,ContextTokens\r\n1,12.5,acme,3\r\n0,13,,4\r\n"
    assert read_azure(write(text)) == [TraceRow(12.5, 3, 1, tenant="acme"), TraceRow(13, 4, 0)]
    zoned = read_azure(write(HEADER + "2024-05-10 00:00:00.009930+00:00,1,1\n2024-05-10 02:00:01+02:00,1,1\n"))
    assert zoned[1].time - zoned[0].time == pytest.approx(0.99007)


def test_an_output_of_nothing_is_replayed_as_one_token(write) -> None:
    assert [a.output_tokens for a in parse_workload(str(write(HEADER + "0,5,0\n1,5,2\n"))).arrivals(0)] == [1, 2]


def test_equal_hash_ids_give_equal_tokens(write) -> None:
    rows = [row(0, 1100, 5, (7, 8, 9)), row(4000, 1200, 6, (7, 8, 11)), row(9000, 40, 1, (12,)), row(9500, 40, 1, None)]
    arrivals = list(parse_workload(f"mooncake:{write(mooncake(*rows), 'm.jsonl')}").arrivals(0))
    assert [a.segments[:3] for a in arrivals[:2]] == [
        ((7, 512), (8, 512), (9, 76)),
        ((7, 512), (8, 512), (11, 176)),
    ]
    one, two, *_ = (prompt_ids(a, 10_000) for a in arrivals)
    assert (len(one), len(two)) == (1100, 1200)
    assert one[:1024] == two[:1024] and one[1024:] != two[1024:1100]
    assert arrivals[3].prompt_tokens == 40 and [a.time for a in arrivals] == [0, 4, 9, 9.5]


def test_scaled_traces_still_share(write) -> None:
    rows = [row(0, 1100, 50, (7, 8, 9)), row(4000, 1200, 6, (7, 8, 11))]
    workload = parse_workload(f"mooncake:{write(mooncake(*rows), 'm.jsonl')},length=1/8,time=0.5,cap_output=3")
    one, two = workload.arrivals(0)
    assert (one.prompt_tokens, two.prompt_tokens, one.output_tokens, two.output_tokens) == (138, 150, 3, 1)
    assert prompt_ids(one, 10_000)[:128] == prompt_ids(two, 10_000)[:128] and two.time == 2.0


def test_format_is_guessed_by_content_not_by_name(write) -> None:
    assert guess_reader(write("\n" + CSV, "trace.jsonl")) is read_azure
    assert guess_reader(write(mooncake(row()), "trace.csv")) is read_mooncake
    quoted = write('"TIMESTAMP","ContextTokens","GeneratedTokens"\n"0","5","1"\n"2","6","1"\n')  # as R writes it
    assert guess_reader(quoted) is read_azure and len(read_azure(quoted)) == 2
    for text in ('"' + "x" * 200_000, '"TIMESTAMP,ContextTokens,GeneratedTokens"\n'):
        with pytest.raises(InputError, match=r"line 1: .* is no trace"):
            guess_reader(write(text))
    with pytest.raises(InputError, match=r"line 1: 'hello' is no trace; it must be a CSV with columns TIMESTAMP"):
        guess_reader(write("hello\n"))


def test_start_limit_and_rate(write) -> None:
    path = write(HEADER + "".join(f"{i},{100 + i},5\n" for i in range(101)))
    whole = parse_workload(str(path))
    assert whole.rate == pytest.approx(1.0) and len(list(whole.arrivals(0))) == 101
    part = parse_workload(f"{path},start=10,limit=11,rate=4")
    arrivals = list(part.arrivals(0))
    assert [a.prompt_tokens for a in arrivals] == list(range(110, 121))
    assert [a.time for a in arrivals] == pytest.approx([i / 4 for i in range(11)])
    with pytest.raises(InputError, match="start is 200 s; the trace is 100 s long"):
        parse_workload(f"{path},start=200")


def test_limit_reads_no_further_than_it_plays(write) -> None:
    path = write(HEADER + "0,1,1\n1,1,1\nbroken\n")
    assert len(list(parse_workload(f"{path},limit=2").arrivals(0))) == 2
    with pytest.raises(InputError, match="line 4: 1 fields"):
        parse_workload(str(path))


def test_all_at_once_cannot_be_given_a_rate(write) -> None:
    path = write(HEADER + "5,1,1\n5,1,1\n5,1,1\n")
    assert [a.time for a in parse_workload(f"{path}").arrivals(0)] == [0, 0, 0]
    with pytest.raises(InputError, match=r"all requests have one time; .* \(bin=1 spreads them over a second\)"):
        parse_workload(f"{path},rate=2")


def binned(count: int = 40, step: float = 3000.0) -> str:
    return mooncake(*(row(step * (i // 8), 10, 1, (i,)) for i in range(count)))


def test_binned_times_are_spread_inside_their_bin(write) -> None:
    path = write(binned(), "m.jsonl")
    workload = parse_workload(str(path))
    arrivals = list(workload.arrivals(1))
    assert [a.segments[0][0] for a in arrivals] == list(range(40))  # order kept
    assert all(3 * (i // 8) <= a.time < 3 * (i // 8) + 3 for i, a in enumerate(arrivals))
    assert len({a.time for a in arrivals}) == 40
    assert list(workload.arrivals(1)) == arrivals
    assert [a.time for a in workload.arrivals(2)] != [a.time for a in arrivals]
    assert workload.rate == pytest.approx(40 / 15)
    assert {a.time for a in parse_workload(f"{path},bin=0").arrivals(1)} == {0, 3, 6, 9, 12}


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=60), st.floats(0, 10), st.integers(0, 5))
def test_spreading_keeps_order_and_stays_inside(times: list[float], width: float, seed: int) -> None:
    times = sorted(round(t) * 1.0 for t in times)
    trace = Trace("t", tuple(TraceRow(t, 1, 1) for t in times), bin_s=width)
    made = [a.time for a in trace.generate((0, seed))]
    assert made == sorted(made)
    assert all(-1e-9 <= m - (t - times[0]) <= width + 1e-9 for m, t in zip(made, times, strict=True))


def test_a_bin_is_guessed_only_where_times_repeat() -> None:
    assert guess_bin([0.0, 0.0, 3.0, 3.0, 3.0, 6.0, 9.0, 9.0]) == 3.0
    assert guess_bin([0.0, 1.0, 1.0, 2.5, 3.0]) == 0.0
    assert guess_bin([4.0, 4.0]) == 0.0
    alone = [100.0 + 7 * i for i in range(6)]
    assert guess_bin([0.0] * 3 + [1.0] * 3 + alone) == 7.0, (
        "half of the requests share their time, if few times are shared"
    )
    assert guess_bin([0.0] * 2 + [1.0] * 3 + alone) == 0.0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no requests; there must be at least one"),
        (HEADER, "no requests; there must be at least one"),
        (
            "TIMESTAMP,ContextTokens\n0,1\n",
            "line 1: no column GeneratedTokens; the header is 'TIMESTAMP,ContextTokens'",
        ),
        (HEADER + "0,5,1\n1,5\n", "line 3: 2 fields; the header has 3"),
        (HEADER + "yesterday,5,1\n", "line 2: TIMESTAMP is 'yesterday'; it must be a date and time"),
        (HEADER + "-4,5,1\n", "line 2: TIMESTAMP is '-4'"),
        (HEADER + "nan,5,1\n", "line 2: TIMESTAMP is 'nan'"),
        (HEADER + "0,-5,1\n", "line 2: ContextTokens is '-5'; it must be a whole number, at least 1"),
        (HEADER + "0,0,1\n", "line 2: ContextTokens is '0'"),
        (HEADER + "0,5,-1\n", "line 2: GeneratedTokens is '-1'; it must be a whole number, at least 0"),
        (HEADER + "0,5,1.5\n", r"line 2: GeneratedTokens is '1.5'"),
        (HEADER + "0,,1\n", "line 2: ContextTokens is ''"),
        (HEADER + "0,1_000,1\n", "line 2: ContextTokens is '1_000'; it must be a whole number"),
        (HEADER + "1_000,5,1\n", "line 2: TIMESTAMP is '1_000'; it must be a date and time"),
        (HEADER + "5,5,1\n3,5,1\n", "line 3: its time is 2 s before the line above; times must not descend"),
        (
            HEADER + "0,5,1\n2023-11-16 18:17:03,5,1\n",
            "line 3: TIMESTAMP is a date and time without a time zone, and that .* above a number of",
        ),
        (
            HEADER + "2024-03-10 10:00:00+02:00,5,1\n2024-03-10 10:00:01,5,1\n",
            "line 3: TIMESTAMP is a date and time without a time zone, and that of the line above a date and time with a",
        ),
        (
            HEADER + "2024-03-10 10:00:00,5,1\n2024-03-10 10:00:01Z,5,1\n",
            "line 3: TIMESTAMP is a date and time with a time zone, and that .* without a time zone; all must be of one kind",
        ),
        (
            HEADER + "2023-11-16 18:17:03,5,1\n1.8e9,5,1\n",
            "line 3: TIMESTAMP is a number of seconds, and that .* a date",
        ),
        (b"\xff\xfe\x00T\x00I", "not UTF-8 text"),
    ],
)
def test_malformed_csv(write, text, complaint: str) -> None:
    path = write(text)
    with pytest.raises(InputError, match=complaint) as caught:
        parse_workload(f"azure-code:{path}")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no requests"),
        ("{nonsense\n", "line 1: not JSON"),
        ("[1, 2]\n", r"line 1: '\[1, 2\]\\n' is not a JSON object"),
        (mooncake(row()) + '{"timestamp": 1, "input_length": 5}\n', "line 2: no field output_length"),
        (mooncake(row(timestamp=-1)), "line 1: timestamp is -1; it must be a number of ms, at least 0"),
        (mooncake(row(timestamp=True)), "line 1: timestamp is True"),
        (mooncake(row(timestamp=float("nan"))), "line 1: timestamp is nan"),
        (mooncake(row(input_length=0)), "line 1: input_length is 0; it must be a whole number, at least 1"),
        (mooncake(row(input_length=2.5)), r"line 1: input_length is 2\.5"),
        (mooncake(row(output_length=-2)), "line 1: output_length is -2"),
        (mooncake(row(hash_ids=(1,))), "line 1: hash_ids has 1 ids; 600 prompt tokens need 2 of 512 tokens"),
        (mooncake(row() | {"hash_ids": "ab"}), "line 1: hash_ids is 'ab'; it must be a list of whole numbers"),
        (
            mooncake(row(hash_ids=(-1, -2))),
            r"line 1: hash_ids is \[-1, -2\]; it must be a list of whole numbers from 0",
        ),
        (mooncake(row(hash_ids=(True, 2))), r"line 1: hash_ids is \[True, 2\]"),
        (mooncake(row(hash_ids=(2**64, 2))), "line 1: hash_ids is"),
        ('{"timestamp": ' + "9" * 5000 + "}\n", "line 1: not JSON"),
        (mooncake(row(tenant=3)), "line 1: tenant is 3; it must be text"),
        (mooncake(row(9), row(3)), r"line 2: its time is 0\.006 s before the line above"),
    ],
)
def test_malformed_jsonl(write, text: str, complaint: str) -> None:
    path = write(text, "m.jsonl")
    with pytest.raises(InputError, match=complaint) as caught:
        parse_workload(f"mooncake:{path}")
    assert str(path) in str(caught.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        parse_workload(f"azure-conv:{tmp_path / 'none.csv'}")
    with pytest.raises(InputError, match="cannot be read"):
        parse_workload(f"mooncake:{tmp_path}")


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 10**6), st.integers(1, 10**5)), min_size=1, max_size=30))
def test_any_trace_written_comes_back(tmp_path_factory, rows) -> None:
    rows.sort()
    path = tmp_path_factory.mktemp("t") / "t.csv"
    path.write_text(HEADER + "".join(f"{t!r},{p},{o}\n" for t, p, o in rows))
    made: list[Arrival] = list(Trace("t", tuple(read_azure(path))).generate((0, 0)))
    assert [(a.time, a.prompt_tokens, a.output_tokens) for a in made] == [(t - rows[0][0], p, o) for t, p, o in rows]


def test_a_column_that_is_there_twice(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens\n0,10,5,20\n")
    with pytest.raises(InputError, match="line 1: column ContextTokens is there 2 times; it must be there once"):
        read_azure(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            {"timestamp": 10**400, "input_length": 1, "output_length": 1},
            "timestamp is 1000.*; it must be a number of ms",
        ),
        (
            {"timestamp": 0, "input_length": 10**400, "output_length": 1},
            "input_length is 1000.*, at least 1 and at most 1000000000",
        ),
        (
            {"timestamp": 0, "input_length": 1, "output_length": 10**10},
            "output_length is 10000000000; it must be a whole number",
        ),
    ],
)
def test_numbers_that_nothing_can_be_counted_in(tmp_path: Path, row: dict[str, int], complaint: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=f"line 1: {complaint}"):
        read_mooncake(tmp_path / "a.jsonl")
