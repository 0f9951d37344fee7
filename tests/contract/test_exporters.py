"""Every export target: it has a row for each knob and fact, says what it loses, and writes what its table says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autotune.export import TARGETS, Export, ExportTarget, Fit, Row, export
from autotune.export.exporting import PUBLISHED
from autotune.export.files import flat
from autotune.export.target import CALL_ROWS, FACT_ROWS, KNOB_ROWS, Ours, ours_of
from autotune.profile import PURPOSES, Profile
from runtime.errors import InputError
from runtime.knobs import KNOBS, Knobs
from tests.sample_profile import sample_model, sample_profile

PATH = Path("out.yaml")
SENTENCE = "were measured on this project's own engine"

any_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
any_knobs = st.builds(
    Knobs,
    max_batch_size=st.integers(1, 4096),
    max_wait_ms=st.sampled_from([0.0, 0.0, 0.5, 20.0]),
    token_budget=st.integers(1, 16384),
    chunk_size=st.integers(1, 16384),
)
any_profile = st.builds(
    lambda knobs, gpu, name, dtype, length, blocks, prefix: sample_profile(
        {"balanced": knobs},
        gpu=gpu,
        model=sample_model(name=name, random_weights=False, dtype=dtype, max_model_len=length),
        kv_blocks=blocks,
        engine={"prefix_cache": prefix},
    ),
    any_knobs,
    st.booleans(),
    st.sampled_from(["Qwen/Qwen3-8B", "./my model", "7", "true", "#x", "a: b"]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.integers(16, 131072),
    st.integers(1, 60000),
    st.booleans(),
)


@any_target
def test_it_handles_every_knob_and_every_fact(target: ExportTarget) -> None:
    assert [*target.knobs] == [f.name for f in fields(Knobs)] == [*KNOB_ROWS]
    assert [*target.facts] == [*FACT_ROWS]
    assert len(target.rows()) == len(KNOB_ROWS) + len(FACT_ROWS)
    if target.calls is not None:
        assert [*target.calls] == [*CALL_ROWS]
        assert {*CALL_ROWS} == {"replicas", *(spec.name for spec in KNOBS if spec.batcher)}


@any_target
@pytest.mark.parametrize("name", [*KNOB_ROWS, *FACT_ROWS])
def test_a_table_without_one_exports_nothing(target: ExportTarget, name: str) -> None:
    fewer = replace(
        target,
        knobs={key: row for key, row in target.knobs.items() if key != name},
        facts={key: row for key, row in target.facts.items() if key != name},
    )
    with pytest.raises(ValueError, match=name):
        export(sample_profile(), fewer, allow_lossy=True)


@any_target
def test_a_further_knob_is_noticed(target: ExportTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are made from the fields of ``Knobs``; with one more of them, no table is complete."""
    metadata = {"unit": "sequences", "low": 1, "high": 9, "log": True, "integer": True, "doc": "a further one"}
    more = make_dataclass("More", [("further", int, field(default=2, metadata=metadata))], bases=(Knobs,), frozen=True)
    rows = ours_of(more)
    assert [*rows] == [*KNOB_ROWS, "further"]
    monkeypatch.setattr("autotune.export.target.KNOB_ROWS", rows)
    with pytest.raises(ValueError, match="further"):
        export(sample_profile(), target)


@any_target
def test_no_two_rows_write_the_same_key(target: ExportTarget) -> None:
    for rows in (target.rows(), [] if target.calls is None else target.call_rows()):
        keys = [key for _, row in rows for key in row.keys]
        assert len(keys) == len({*keys})


@any_target
@given(profile=any_profile)
def test_what_is_lost_is_said_and_what_is_written_is_the_tables(target: ExportTarget, profile: Profile) -> None:
    made = attempt(profile, target)
    if made is None:
        return
    reports, text = made.reports, made.text(PATH)
    for entry, (ours, row) in zip(made.entries, target.rows(), strict=True):
        assert entry.name == ours.name and {*entry.written} <= {*row.keys}
        if Fit.EXACT in (row.fit, entry.fit):
            assert not entry.lossy and entry.written
        else:
            assert entry.note and any(entry.note in line for line in text_lines(text)), "the file says it"
        if entry.lossy or row.fit is Fit.UNSUPPORTED:
            assert any(entry.name in line and entry.note in line for line in reports), "the user is told"


def attempt(profile: Profile, target: ExportTarget) -> Export | None:
    """The export; None when the target itself would refuse it, which must be one line."""
    try:
        return export(profile, target, allow_lossy=True)
    except InputError as error:
        assert str(error).startswith(f"{target.title} would refuse this: ") and "\n" not in str(error)
        return None


def text_lines(text: str) -> list[str]:
    """Comments of the file, each entry's on one line again."""
    return [" ".join(block.replace("\n#", " ").split()) for block in re.split(r"\n\n|\n(?=# \S)", text)]


@any_target
@given(profile=any_profile)
def test_a_knob_without_counterpart_is_an_error_unless_its_value_loses_nothing(
    target: ExportTarget, profile: Profile
) -> None:
    made = attempt(profile, target)
    if made is None:
        return
    lost = [entry.name for entry in made.entries if entry.lossy and entry.fit is Fit.UNSUPPORTED]
    if not lost:
        assert export(profile, target).written == made.written
        return
    with pytest.raises(
        InputError, match=rf"no counterpart in {target.title}(: .*)?; .*--allow-lossy\) drops"
    ) as caught:
        export(profile, target)
    assert all(f"{name}=" in str(caught.value) for name in lost)


@any_target
@given(one=any_knobs, other=any_knobs)
def test_an_exact_row_loses_nothing(target: ExportTarget, one: Knobs, other: Knobs) -> None:
    """Two settings that differ in one knob, and act differently, are written differently where the row is exact."""
    for name, row in target.knobs.items():
        changed = one.with_(**{name: getattr(other, name)})
        if row.fit is not Fit.EXACT or effective(changed) == effective(one):
            continue
        made = [attempt(sample_profile({"balanced": knobs}), target) for knobs in (one, changed)]
        if made[0] is not None and made[1] is not None:
            assert made[0].written != made[1].written


def effective(knobs: Knobs) -> Knobs:
    """The setting that acts the same: a step never holds more sequences than tokens."""
    return knobs.with_(max_batch_size=min(knobs.max_batch_size, knobs.token_budget))


@any_target
@given(profile=any_profile)
def test_the_file_reads_back_as_what_was_meant(target: ExportTarget, profile: Profile) -> None:
    made = attempt(profile, target)
    if made is None:
        return
    text = made.text(PATH)
    assert read(target, text) == made.written
    assert text == made.text(PATH), "the same profile gives the same file"


def read(target: ExportTarget, text: str) -> Mapping[str, object]:
    """Their keys and values, those of a section as ``section.key``."""
    if ".yaml" in target.suffixes:
        return flat(yaml.safe_load(text))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return flat(yaml.safe_load("\n".join(line.replace(" {", ":") for line in lines if line != "}")))


@any_target
@pytest.mark.parametrize("purpose", PURPOSES)
def test_the_file_says_where_its_figures_come_from(target: ExportTarget, purpose: str) -> None:
    profile = sample_profile()
    made = export(profile, target, purpose=purpose, profile_name="mine.yaml", allow_lossy=True)
    head = " ".join(line.removeprefix("#") for line in made.text(PATH).split("\n\n")[0].split("\n"))
    head = " ".join(head.split())
    assert SENTENCE in head and f"not on {target.title}" in head
    for said in (
        "mine.yaml", profile.created, profile.command, "NVIDIA H200", "torch 2.13.0", "llama-3.1-8b", "random weights",
        "azure-conv", "ttft=500ms,tpot=50ms@99%", f"{purpose}:", "99.4% of 1200 requests met the SLO", "TTFT p99 212 ms",
        profile.verdict, made.command(PATH),
    ):  # fmt: skip
        assert said in head, said


@any_target
def test_a_profile_cannot_smuggle_settings_in(target: ExportTarget) -> None:
    """Profiles are passed around; their texts stay comments."""
    evil = "x\nhost: 0.0.0.0\r\ntrust-remote-code: true\u2028port: 1\x85y: 2\x1b[2J"
    plain = sample_profile()
    changes = {
        "command": evil, "verdict": evil, "slo_from": evil,
        "machine": plain.machine.model_copy(update={"cpu": evil, "os": evil}),
        "workload": plain.workload.model_copy(update={"spec": evil}),
        "software": plain.software.model_copy(update={"torch": evil}),
    }  # fmt: skip
    unchecked = sample_profile(gpu=True, **changes).model_copy(update={"created": evil})  # loading refuses that one
    made = export(unchecked, target, profile_name=evil, allow_lossy=True)
    text = made.text(PATH)
    assert read(target, text) == made.written
    assert "\x1b" not in text and "\x1b" not in "".join(made.reports)
    ours = {word for key in made.written for word in key.split(".")} | {"}"}
    assert all(line.startswith("#") or not line or line.split(":")[0].split()[0] in ours for line in text.splitlines())


@any_target
@given(profile=any_profile)
def test_nothing_is_written_that_the_target_would_refuse(target: ExportTarget, profile: Profile) -> None:
    made = attempt(profile, target)
    if made is not None:
        assert not any(constraint(made.written) for constraint in target.constraints)


@any_target
def test_measured_on_a_cpu_or_with_another_model_is_said(target: ExportTarget) -> None:
    made = export(sample_profile(gpu=False), target, model="./other", allow_lossy=True)
    for said in ("measured on a CPU", "measured with model llama-3.1-8b, exported for ./other"):
        assert any(said in line for line in made.reports)
        assert f"# WARNING: {said}" in made.text(PATH)
    stopped = export(sample_profile(status="stopped", slo_met=False), target, allow_lossy=True)
    assert any("stopped" in line for line in stopped.reports) and any("not met" in line for line in stopped.reports)


def test_every_preset_has_a_published_model_or_says_that_there_is_none() -> None:
    from runtime.torch_backend.presets import PRESETS

    assert {*PUBLISHED} == {*PRESETS}
    for name, hub_id in PUBLISHED.items():
        assert hub_id is None or hub_id in PRESETS[name].doc


@dataclass(frozen=True)
class Wrong:
    fit: Fit
    fields: Mapping[str, object]


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong(Fit.EXACT, {}),
        Wrong(Fit.EXACT, {"keys": ("a",), "said": "almost"}),
        Wrong(Fit.APPROXIMATE, {"keys": ("a",)}),
        Wrong(Fit.APPROXIMATE, {"said": "almost"}),
        Wrong(Fit.UNSUPPORTED, {}),
        Wrong(Fit.UNSUPPORTED, {"said": "no", "keys": ("a",)}),
    ],
    ids=str,
)
def test_a_row_that_does_not_say_what_it_must_is_refused(wrong: Wrong) -> None:
    with pytest.raises(ValueError, match=f"a row that is {wrong.fit}"):
        Row(wrong.fit, **wrong.fields)  # type: ignore[arg-type]


def test_a_value_is_told_as_people_write_it() -> None:
    source = export(sample_profile(), TARGETS["vllm"]).source
    shown = [Ours("a", "ms", "", lambda s, v=v: v).shown(source) for v in (5.0, 0.5, 7, True, False, "x")]  # type: ignore[misc]
    assert shown == ["a 5 ms", "a 0.5 ms", "a 7 ms", "a on ms", "a off ms", "a x ms"]
