"""Profiles edited by hand into nonsense: one line that names the file, the field and the value, and nothing else ever."""

from __future__ import annotations

import copy
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.cli.main import run
from autotune.profile import dump_profile, load_profile
from autotune.profile.text import DEEPEST, LARGEST
from runtime.errors import InputError
from tests.sample_profile import full_profile

VALID: dict[str, Any] = yaml.safe_load(dump_profile(full_profile()))


def complaint(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_profile(path)
    text = str(caught.value)
    assert "\n" not in text and text.startswith(f"{path}: "), text
    return text.removeprefix(f"{path}: ")


def edited(tmp_path: Path, *changes: tuple[tuple[str | int, ...], Any]) -> Path:
    data = copy.deepcopy(VALID)
    for keys, value in changes:
        at: Any = data
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def test_unedited_it_loads(tmp_path: Path) -> None:
    assert load_profile(edited(tmp_path)) == full_profile()


POINT = ("points", 0)
BALANCED = ("settings", "balanced")


@pytest.mark.parametrize(
    ("keys", "value", "text"),
    [
        # figures that are none
        ((*POINT, "goodput", "mean"), math.nan, "points.0.goodput.mean is nan; it must be a finite number"),
        ((*POINT, "rate"), math.inf, "points.0.rate is inf; it must be a finite number"),
        (("calibration", "alone_ttft_ms"), -1.5, "calibration.alone_ttft_ms is -1.5; it must be at least 0"),
        (("workload", "window_s"), 0, "workload.window_s is 0; it must be above 0"),
        ((*POINT, "e2e_p99_ms"), -1, "points.0.e2e_p99_ms is -1; it must be at least 0"),
        ((*POINT, "attainment"), 1.5, "points.0.attainment is 1.5; it must be at most 1"),
        ((*POINT, "attainment"), 0.5, "points.0.attainment is 0.5; it must be met / offered (1193 of 1200)"),
        ((*POINT, "met"), 1201, "points.0.met is 1201; it must be at most offered (1200)"),
        ((*POINT, "ttft_p50_ms"), 900, "points.0.ttft_p50_ms is 900; it must be at most ttft_p99_ms (212)"),
        ((*POINT, "tpot_p99_ms"), 1, "points.0.tpot_p50_ms is 20; it must be at most tpot_p99_ms (1)"),
        ((*POINT, "goodput", "low"), 20, "points.0.goodput.low is 20; it must be at most high (12.1)"),
        ((*POINT, "seeds"), [-1], "points.0.seeds.0 is -1; it must be at least 0"),
        ((*POINT, "stage"), "guess", "points.0.stage is 'guess'; it must be 'simulation', 'search', "),
        (("price_per_hour",), 0, "price_per_hour is 0; it must be above 0"),
        (("engine", "kv_pool", "blocks"), 10**30, "engine.kv_pool.blocks is 1000000000000000000000000000000; it must be at mo"),
        (("confidence", "best"), 80, "confidence.best is 80; it must be at most 1"),
        # wrong types
        (("machine", "cores"), "two", "machine.cores is 'two'; it must be a whole number"),
        (("machine", "cores"), 2.5, "machine.cores is 2.5; it must be a whole number"),
        (("machine", "cores"), True, "machine.cores is True; it must be a whole number"),
        (("machine", "cores"), "2", "machine.cores is '2'; it must be a whole number"),
        (("machine",), [1], "machine is [1]; it must be a mapping (name: value)"),
        (("machine",), None, "machine is None; it must be a mapping (name: value)"),
        (("points",), {"a": 1}, "points is {'a': 1}; it must be a list"),
        (("points", 0), "best", "points.0 is 'best'; it must be a mapping (name: value)"),
        (("settings",), ["a"], "settings is ['a']; it must be a mapping (name: value)"),
        (("slo_met",), "perhaps", "slo_met is 'perhaps'; it must be true or false"),
        (("name",), "", "name is ''; it must be text, not empty"),
        (("name",), 7, "name is 7; it must be text"),
        (("slo",), "", 'slo: "" is not a target; '),
        (("slo",), "ttft=nanms", "slo: "),
        (("slo",), "ttft=1e400ms", "slo: "),
        # fields that are not there, or do not belong
        (("machine", "core"), 2, "machine.core is not a field of a profile; did you mean cores?"),
        (("chunk_sise",), 2, "chunk_sise is not a field of a profile; a profile has schema_version, name, "),
        (("verdikt",), "x", "verdikt is not a field of a profile; did you mean verdict?"),
        (("software", "zzz"), "x", "software.zzz is not a field of a profile; software has autotune, torch, "),
        (("settings", "balance"), VALID["settings"]["balanced"], "settings.balance is not a field of a profile; did you mean "),
        ((*BALANCED, "knobs", "token_budgets"), 1, "settings.balanced.knobs.token_budgets is not a knob; the knobs are "),
        # what the parts say of each other
        ((*BALANCED, "knobs", "token_budget"), 300, "settings.balanced.point.knobs are not those of the setting"),
        ((*BALANCED, "point", "rate"), 99, "settings.balanced.point is of max_batch_size=32 "),
        (("knobs", "token_budget"), 300, "knobs are max_batch_size=32 max_wait_ms=0 token_budget=300 chunk_size=256"),
        (("capacity", "rate"), 99, "capacity.rate is 99; it must be the rate of a point in tried"),
        (("engine", "limits", "token_budget"), 700, "settings.throughput.knobs.token_budget is 768; it must be a whole number"),
        (("machine", "gpu"), None, "machine.gpu is null; where kind is gpu it must say which"),
        # the cost model
        (("cost_model", "covariance"), [[1.0]], "cost_model.covariance has 1 rows of 1; it must be 7 × 7"),
        (("cost_model", "covariance"), [], "cost_model.covariance has 0 rows of 0; it must be 7 × 7"),
        (("cost_model", "covariance", 1), [1.0], "cost_model.covariance has 7 rows of 1 or 7; it must be 7 × 7"),
        (("cost_model", "covariance", 0, 0), -1.0, "cost_model.covariance has a variance of -1 in row 1"),
        (("cost_model", "covariance", 0, 1), 1.0, "cost_model.covariance is not symmetric in row 2, column 1"),
        (("cost_model", "coefficients"), {}, "cost_model.coefficients is {}; "),
        (("cost_model", "coefficients", "overhead_s"), math.nan, "cost_model.coefficients.overhead_s is nan; "),
        (("cost_model", "coefficients", "overhead_s"), -1, "cost_model.coefficients.overhead_s is -1; it must be a number of"),
        (("cost_model", "coefficients", "pair_s"), 1e9, "cost_model.coefficients.pair_s is 1e+09; it must be at most 0.001"),
        (("cost_model", "coefficients", "decode_s"), 1e9, "cost_model.coefficients.decode_s is 1e+09; it must be at most 1000"),
        (("cost_model", "coefficients", "overhed_s"), 1, "cost_model.family is 'sum'; it has no coefficients overhed_s"),
        (("cost_model", "coefficients", "token_s@x"), 1, "cost_model.family is 'sum'; "),
        (("cost_model", "coefficients", "expert_tokens"), 0, "cost_model.coefficients.expert_tokens is 0; it must be above 0"),
        (("cost_model", "family"), "zzz", "cost_model.family is 'zzz'; it must be sum, max or norm2"),
        (("cost_model", "family"), "max", "cost_model.family is 'max'; its coefficients weights_s are missing"),
        (("simulation", "speed"), 1e-9, "simulation.speed is 1e-09; it must be at least 0.001"),
        (("workload", "rate"), 1e-12, "workload.rate is 1e-12; it must be at least 1e-06"),
        (("workload", "rate"), 1e15, "workload.rate is 1000000000000000.0; it must be at most 1e+06"),
        (("engine", "kv_pool", "blocks"), 10**12, "engine.kv_pool holds 1.6e+13 tokens in all; it must be at most 1073741824"),
        (("cost_model", "learner", "mixed"), [1.0], "cost_model.learner.mixed is [1.0]; "),
        (("cost_model", "learner", "decode_covariance"), [[1.0]], "cost_model.learner.decode_covariance has 1 rows of 1; it m"),
        (("cost_model", "regions", 1, "region"), "decode", "cost_model.regions are decode, decode, mixed; each may be there o"),
        (("cost_model", "regions", 1, "median"), 0.5, "cost_model.regions.1.median is 0.5; it must be at most p90 (0.05)"),
        (("cost_model", "jitter"), {"quantiles": [1.5, 0.5], "persistent": 0.5, "memory": 0.5},
         "cost_model.jitter.quantiles are not in ascending order"),
        (("cost_model", "jitter"), {"quantiles": [0.5, 1.0], "persistent": 0.5, "memory": 0.5},
         "cost_model.jitter.quantiles have a mean of 0.75; it must be 1"),
        (("cost_model", "jitter"), {"quantiles": [0.5, 1.5], "persistent": 1.5, "memory": 0.5},
         "cost_model.jitter.persistent is 1.5; "),
        (("cost_model", "serving_overhead_s"), -1.0, "cost_model.serving_overhead_s is -1"),
        # dates and files
        (("created",), "yesterday", "created is 'yesterday'; it must be a date and time such as "),
        (("created",), "2026-13-45", "created is '2026-13-45'; it must be a date and time such as "),
        (("points_file",), "../../secret", "points_file is '../../secret'; it must be the name of a file in the profile's own"),
        (("points_file",), "..", "points_file is '..'; it must be the name of a file"),
    ],
)  # fmt: skip
def test_nonsense_is_named(tmp_path: Path, keys: tuple[str | int, ...], value: Any, text: str) -> None:
    assert complaint(edited(tmp_path, (keys, value))).startswith(text)


def test_a_date_that_yaml_would_make_one_of_stays_text(tmp_path: Path) -> None:
    path = edited(tmp_path)
    path.write_text(path.read_text().replace("created: '2026-03-01T12:00:00+00:00'", "created: 2026-03-01"))
    assert load_profile(path).created == "2026-03-01"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"name: a\nmachine:\n  cores: 1\n  os: x\n  cores: 2\n", "machine.cores is given twice, in lines 3 and 5"),
        (b"name: a\nname: b\n", "name is given twice, in lines 1 and 2"),
        (b"points:\n- a: 1\n- {a: 1, a: 2}\n", "points.1.a is given twice, in lines 3 and 3"),
        (b"a: &x [1]\nb: *x\n", "line 1: &x is an anchor"),
        (b"a: 1\nb: *x\n", "line 2: *x is an alias"),
        (b"a: 1\n<<: {b: 1}\n", "schema_version is missing"),
        (b"a: !!python/name:os.system\n", "line 1: tag:yaml.org,2002:python/name:os.system is a tag"),
        (b"a: !secret x\n", "line 1: !secret is a tag"),
        (b"a: " + b"[" * 100000, f"line 1: nested more than {DEEPEST} deep"),
        (b"- " * 100000, f"line 1: nested more than {DEEPEST} deep"),
        (b"a: 1\n---\nb: 1\n", "line 2: a second document begins"),
        (b'{"action": "set", "cause": "c"}\n{}\n', "is a decision log, not a profile; `autotune explain "),
        (b'{"id": "a", "arrival": 1, "token_times": []}\n', "is a log of requests, not a profile; `autotune report "),
        (b'{"sum":1,"op_code":0}\n{"sum":2,"op_code":4}\n', "is the study of a profiling run, not a profile; `autotune prof"),
        (b"? [a, b]\n: 1\n", "line 1: "),
        (b'"\\ud800": 1\n', ""),
        (b'a: "\\ud800"\n', ""),
        (b"a: \xff\n", "is not a text file in UTF-8"),
        (b"\x7fELF\x00\x01\x02", "is not a text file"),
        ("name: é\n".encode("utf-16"), "is not a text file in UTF-8"),
        (b"a: \x1b[2J\n", "not valid YAML: "),
        (b"", "is not a profile (it holds no fields)"),
        (b"# only a comment\n", "is not a profile (it holds no fields)"),
        (b"just words\n", "is not a profile (it holds no fields)"),
        (b"schema_version: " + b"9" * 5000, "schema_version is inf; it must be a whole number"),
        (b"a: 1\n" + b"#" * LARGEST, "is larger than 4 MiB"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("parser", [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)])
def test_files_of_another_kind(
    tmp_path: Path, content: bytes, text: str, parser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With either of PyYAML's parsers: not every build of it has the fast one."""
    monkeypatch.setattr("autotune.profile.text._Parser", parser)
    path = tmp_path / "p.yaml"
    path.write_bytes(content)
    assert complaint(path).startswith(text)


def test_a_bomb_of_aliases_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]
    path.write_text("\n".join(lines))
    assert "anchor" in complaint(path)


def test_what_has_no_end_is_not_read_to_it(tmp_path: Path) -> None:
    assert "is larger than 4 MiB" in complaint(Path("/dev/zero"))
    assert complaint(tmp_path) == "cannot be read (Is a directory)"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(dump_profile(full_profile())))
    writer.start()
    assert load_profile(pipe) == full_profile()
    writer.join()
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    assert complaint(loop).startswith("cannot be read (")
    with pytest.raises(InputError, match="cannot be read"):
        load_profile("a\0b.yaml")


def test_the_command_line_says_it_in_one_line_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = edited(tmp_path, ((*POINT, "attainment"), 7))
    before = path.read_bytes()
    for verb in (["show"], ["export", "--to", "vllm"], ["serve", "--profile"], ["bench", "--profile"]):
        assert run([*verb, str(path)]) == 2
        out, error = capsys.readouterr()
        assert error == f"error: {path}: points.0.attainment is 7; it must be at most 1\n"
        assert out == ""
    assert path.read_bytes() == before
