"""The profile of a callable as a file, and what is said of input that cannot be used."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from rich.console import Console

import autotune
from autotune.cli.main import run
from autotune.cli.profile_output import unmeasured_beside
from autotune.profile import load_profile, save_profile
from autotune.profile.callable import (
    CallableProfile,
    items_per_s,
    load_callable_profile,
    load_either,
    save_callable_profile,
)
from autotune.profile.fingerprint import machine, software
from autotune.profile.parts import GpuInfo
from autotune.profiling.assemble import assemble, of_callable
from autotune.profiling.batcher_space import AS_IT_COMES, ONE_AT_A_TIME
from autotune.profiling.target import OfferedLoad
from autotune.report.callable_table import show, table
from autotune.simulate.batcher import SimulatedBatcher
from runtime import SLO, Batcher, InputError
from tests.sample_profile import sample_profile
from tests.unit.callable_world import Ticking, calibrated, findings, question, simulated, subject


@pytest.fixture(scope="module")
def made() -> CallableProfile:
    """As a run that was stopped while it simulated writes it."""
    ticking, slo = Ticking(0.020, 0.002), SLO(e2e_ms=400)
    of = subject(ticking)
    cost, load = calibrated(ticking, of), OfferedLoad(200.0, 1, 5.0, 1.0)
    runs = [simulated(s, cost, [1], load, slo) for s in (AS_IT_COMES, ONE_AT_A_TIME)]
    found = findings(cost, slo, 200.0, runs, capacity=380.0, capacity_size=32)
    found.stopped = True
    return assemble(
        CallableProfile,
        found,
        of_callable(found, question(slo, 200.0, 60.0), of),
        name="embed",
        command="autotune profile",
        machine=machine(),
        software=software(),
    )


@pytest.fixture
def file(made: CallableProfile, tmp_path: Path) -> Path:
    save_callable_profile(made, tmp_path / "embed.yaml")
    return tmp_path / "embed.yaml"


def test_what_is_written_is_read_back(made: CallableProfile, file: Path) -> None:
    assert load_callable_profile(file) == load_either(file) == made
    assert made.strategy == "adaptive" and made.slo_met and "not measured" in made.verdict


def keys(data: object) -> object:
    """The names in ``data``, in the order of the file; of a list those of its first."""
    if isinstance(data, dict):
        return [(name, keys(value)) for name, value in data.items()]
    return keys(data[0]) if isinstance(data, list) and data else None


BEFORE = Path(__file__).parent / "data" / "callable-profile-version-1.yaml"


@pytest.mark.parametrize(
    ("rate", "said"),
    [(1000.0, "1,000"), (1658.9, "1,660"), (999.6, "1,000"), (12.34, "12.3"), (0.25, "0.25"), (20000, "20,000")],
)
def test_rates_are_said_without_powers_of_ten(rate: float, said: str) -> None:
    assert items_per_s(rate) == f"{said} items/s"


def test_a_file_of_the_version_before_loads(tmp_path: Path) -> None:
    old, found = yaml.safe_load(BEFORE.read_text(encoding="utf-8")), load_callable_profile(BEFORE)
    new, load = found.model_dump(mode="json"), old["load"]
    assert {name: new["service"].pop(name) for name in ("capacity", "capacity_size")} == {
        name: load.pop(name) for name in ("capacity", "capacity_size")
    }
    same = old.keys() - {"schema_version", "load"}
    assert {name: new[name] for name in same} == {name: old[name] for name in same}, "nothing measured is changed"
    assert (found.schema_version, found.confidence, found.why_rate) == (2, None, load["rate_from"])
    workload, first = found.workload, found.points[0]
    assert (workload.rate, workload.search_seed) == (load["rate"], load["seed"])
    assert workload.mean_prompt == old["inputs"]["mean_cost"] and workload.validation_seeds == ()
    assert first.goodput == pytest.approx(first.met / workload.window_s), (
        "the window that was simulated: none was measured"
    )
    assert workload.offered_rate == pytest.approx(first.offered / workload.window_s)
    save_callable_profile(found, tmp_path / "new.yaml")
    assert load_callable_profile(tmp_path / "new.yaml") == found


@pytest.mark.parametrize(
    ("rate", "why"),
    [
        (96.0, "80% of what it can do inside the SLO"),
        (1000.0, "the most that is offered unless --rate asks for more"),
    ],
)
def test_a_measured_one_of_the_version_before_keeps_its_windows_and_seeds(
    rate: float, why: str, tmp_path: Path
) -> None:
    old = yaml.safe_load(BEFORE.read_text(encoding="utf-8"))
    old["load"] |= {"rate": rate, "rate_from": why, "window_s": 2.5, "warmup_s": 0.5}
    old["points"][0] |= {"source": "measured", "seeds": [2000004, 2000003], "goodput": old["points"][0]["met"] / 5.0}
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(old), encoding="utf-8")
    found = load_callable_profile(tmp_path / "old.yaml")
    load = found.workload
    assert (load.window_s, load.warmup_s, load.validation_seeds) == (2.5, 0.5, (2000003, 2000004))
    assert load.offered_rate == pytest.approx(found.points[0].offered / 5.0) and found.why_rate == why


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda old: old.pop("load"), "service.capacity is missing"),
        (lambda old: old["load"].pop("rate"), "workload.rate is missing"),
        (lambda old: old.update(points=[]), "points "),
        (lambda old: old["points"][0].update(goodput="much"), "points.0.goodput is 'much'"),
        (lambda old: old["load"].update(capacity=-1), "service.capacity is -1"),
    ],
)
def test_nonsense_in_a_file_of_the_version_before_is_one_line(change: Any, text: str, tmp_path: Path) -> None:
    old = yaml.safe_load(BEFORE.read_text(encoding="utf-8"))
    change(old)
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(old), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_callable_profile(tmp_path / "old.yaml")
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_its_load_is_told_as_that_of_an_engine(file: Path) -> None:
    of_engine = keys(sample_profile().model_dump(mode="json")["workload"])
    assert keys(yaml.safe_load(file.read_text(encoding="utf-8"))["workload"]) == of_engine


@pytest.mark.parametrize("width", [80, 90, 95, 100, 110, 120])
def test_its_table_is_never_cut(made: CallableProfile, width: int) -> None:
    console = Console(width=width, file=StringIO(), record=True)
    console.print(table(made, width))
    text = console.export_text()
    assert "…" not in text and text.count("\n") == 1 + len(made.points) and "recommended (simulated)" in text
    assert "items/call" in text or width < 110


def test_a_bounded_batcher_as_it_comes_is_shown_with_its_bound(made: CallableProfile) -> None:
    def shown(profile: CallableProfile) -> str:
        console = Console(width=200, file=StringIO(), record=True)
        show(profile, console)
        return console.export_text()

    bounded = [
        p.model_copy(update={"knobs": p.knobs.with_(max_batch_size=8)}) if p.setting == AS_IT_COMES else p
        for p in made.points
    ]
    assert "as it comes: Batcher(fn, slo=…), no other option" in shown(made)
    text = shown(made.model_copy(update={"points": tuple(bounded)}))
    assert "Recommended is the Batcher as it comes: Batcher(fn, slo=…, max_batch_size=8) needs nothing else." in text
    text = shown(made.model_copy(update={"points": tuple(reversed(bounded))}))
    assert "as it comes (simulated)" in text and "Recommended is" not in text and "also tried" not in text


def test_whatever_reads_a_language_models_profile_refuses_it(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        InputError, match=r"embed\.yaml: is the profile of a callable \('m:f'\), not of a language model"
    ):
        load_profile(file)
    verbs = (
        ["export", str(file), "--to", "vllm"], ["check", str(file)], ["report", str(file)], ["simulate", "--profile", str(file)],
        ["capacity", str(file)], ["serve", "--profile", str(file)], ["bench", "--profile", str(file)],
    )  # fmt: skip
    assert run(["show", str(file), "--price", "1/h"]) == 2
    assert "makes no tokens that could have a price" in capsys.readouterr().err
    for verb in verbs:
        assert run(verb) == 2
        told = capsys.readouterr().err
        assert "is the profile of a callable ('m:f')" in told and told.count("\n") == 1, verb
    save_profile(sample_profile(), tmp_path / "llm.yaml")
    with pytest.raises(InputError, match="is not the profile of a callable"):
        load_callable_profile(tmp_path / "llm.yaml")
    with Batcher(list) as batcher, pytest.raises(InputError, match="is the profile of a language model"):
        autotune.control(batcher, profile=tmp_path / "llm.yaml")


def test_its_schema_is_printed_and_fits(
    file: Path, made: CallableProfile, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["profiles", "--schema", "--callable"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    validator.validate(data)
    assert not validator.is_valid(data | {"strategy": "eager"}) and not validator.is_valid(
        sample_profile().model_dump()
    )
    assert set(schema["properties"]) == set(CallableProfile.model_fields) and "callable" in schema["title"]
    assert run(["profiles", "--callable"]) == 2
    assert "--callable is given without --schema" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "given", "slo"),
    [(None, None, "e2e=400ms"), ("e2e=1s", None, "e2e=1s"), ("e2e=1s", "e2e=300ms@90%", "e2e=300ms@90%")],
)
def test_a_live_batcher_starts_from_it(file: Path, own: str | None, given: str | None, slo: str) -> None:
    """The SLO: what ``control`` is given, else what the batcher has, else what was profiled for."""
    content = file.read_text(encoding="utf-8").replace("max_batch_size: 4096", "max_batch_size: 24")
    file.write_text(content, encoding="utf-8")
    with Batcher(list, slo=own) as batcher, autotune.control(batcher, slo=given, profile=file) as control:
        assert batcher.slos["default"] == control.slo == SLO.parse(slo)
        assert batcher.knobs.max_batch_size == 24 and batcher(3) == 3
        (first,) = [d for d in control.decisions if d.action == "set"]
        assert first.cause == "starting knobs of the profile"


def test_a_controller_starts_from_it_and_takes_its_slo(
    file: Path, made: CallableProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Batcher(list, max_batch_size=7) as batcher,
        autotune.control(batcher, profile=file, observe_only=True) as attached,
    ):
        assert attached.slo == made.slo and not batcher.slos
    with (
        Batcher(list, strategy="dynamic") as batcher,
        pytest.warns(UserWarning, match="profile is for the adaptive strategy, not dynamic"),
        autotune.control(batcher, profile=file, observe_only=True),
    ):
        pass
    with (
        Batcher(list, replicas=2) as batcher,
        pytest.warns(UserWarning, match="profile is for 1 workers, not 2"),
        autotune.control(batcher, profile=file, observe_only=True),
    ):
        pass
    gpu = GpuInfo(name="NVIDIA H200", count=1, memory_gib=139.0, capability="9.0", cuda="13.0")
    elsewhere = made.machine.model_copy(update={"kind": "gpu", "gpu": gpu})
    save_callable_profile(made.model_copy(update={"machine": elsewhere}), file)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with (
        Batcher(list) as batcher,
        pytest.warns(UserWarning, match="profile was measured on NVIDIA H200, but this run uses the CPU"),
        autotune.control(batcher, profile=file, observe_only=True),
    ):
        pass
    with Batcher(list) as batcher, pytest.raises(ValueError, match=r'slo is None.* pass slo="e2e=200ms"'):
        autotune.control(batcher)


def test_a_simulated_batcher_is_of_no_machine(made: CallableProfile, tmp_path: Path) -> None:
    """So a profile of another one says what it was simulated from; live there is a warning."""
    other = tmp_path / "other.yaml"
    save_callable_profile(
        made.model_copy(update={"machine": made.machine.model_copy(update={"cpu": "Old CPU"})}), other
    )
    batcher = SimulatedBatcher(lambda call: 0.01, [1])
    with autotune.control(batcher, profile=other, observe_only=True) as attached:
        assert attached.slo == made.slo
    with (
        Batcher(list) as live,
        pytest.warns(UserWarning, match="profile was measured on Old CPU"),
        autotune.control(live, profile=other, observe_only=True),
    ):
        pass


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("strategy: adaptive", "strategy: eager", "strategy is 'eager'; it must be 'adaptive' or 'dynamic'"),
        (
            "max_batch_size: 4096",
            "max_batch_size: 0",
            "max_batch_size is 0; it must be a whole number between 1 and 65536",
        ),
        ("slo: e2e=400ms@99%", "slo: e2e=fast", 'slo: "e2e=fast" is not a target'),
        ("slo_met: true", "slo_met: true\nslo_mat: true", "is not a field of a profile; did you mean slo_met?"),
        ("schema_version: 2", "schema_version: 3", "made by a newer autotune (this one reads 1 to 2)"),
        ("schema_version: 2", "schema_version: true", "schema_version is True; it must be a whole number from 1 to 2"),
        ("schema_version: 2\n", "", "schema_version is missing; `autotune profile` writes it, 2 at present"),
        ("offered: ", "offered: 9", "points.0.attainment is "),
        ("per_item_ms: ", "per_item_ms: -", "service.per_item_ms is -1.99"),
        ("kind: callable", "kind: other", "is not the profile of a callable (kind is 'other')"),
    ],
)
def test_nonsense_is_one_line(file: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, text: str) -> None:
    content = file.read_text(encoding="utf-8")
    assert old in content
    file.write_text(content.replace(old, new, 1), encoding="utf-8")
    assert run(["show", str(file)]) == 2
    told = capsys.readouterr().err
    assert text in told and told.count("\n") == 1


FUNCTIONS = (
    "value = 3\ndef f(items): return items\ndef g(items):\n    yield items\ndef bad(item): raise OSError('gone')\n"
)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--callable", "nocolon"], "--callable is 'nocolon'; write package.module:function"),
        (["--callable", "no_such_module_here:f"], "--callable: there is no module no_such_module_here"),
        (["--callable", "needs_more:f"], "--callable: needs_more needs a module that is not there: not_installed_here"),
        (["--callable", "raises_it:f"], "--callable: importing raises_it failed: RuntimeError: no licence"),
        (["--callable", "some_functions:h"], "--callable: some_functions has no h"),
        (["--callable", "some_functions:value"], "--callable: some_functions:value is int, not callable"),
        (["--callable", "some_functions:g"], "--callable: some_functions:g is a generator"),
        (["--inputs", "none.jsonl"], "--inputs: none.jsonl cannot be read (No such file or directory)"),
        (["--inputs", "empty.jsonl"], "--inputs: empty.jsonl holds no inputs"),
        (["--inputs", "broken.jsonl"], "--inputs: broken.jsonl: line 3 is not JSON (Expecting value)"),
        (["--inputs", "digits.jsonl"], "--inputs: digits.jsonl: line 1 is not JSON (Exceeds the limit"),
        (["--inputs", "latin.jsonl"], "--inputs: latin.jsonl is not a text file in UTF-8"),
        (
            ["--cost", "length"],
            "--cost: 'length' is neither a builtin function such as len nor package.module:function",
        ),
        (["--cost", "len"], "--cost: len failed on input 2 of good.jsonl: TypeError: "),
        (["--cost", "some_functions:bad"], "--cost: some_functions:bad failed on input 1 of good.jsonl: OSError: gone"),
        (["--slo", "ttft=50ms"], "--slo is ttft=50ms; the SLO of a callable has e2e alone, such as e2e=200ms@99%"),
        (["--slo", "e2e=50"], '--slo: "e2e=50" has no unit'),
        (["--rate", "0"], "--rate is 0; it must be a number from 1e-06 to 20000 items/s"),
        (["--rate", "1e-7"], "--rate is 1e-07; it must be a number from 1e-06 to 20000 items/s"),
        (["--rate", "nan"], "--rate is nan; it must be a number from 1e-06 to 20000 items/s"),
        (["--rate", "30000"], "--rate is 30000; it must be a number from 1e-06 to 20000 items/s"),
        (["--budget", ""], "--budget is empty; give it a value, or leave it out"),
        (["--most", "0"], "--most is 0; it must be between 1 and 4096 items"),
        (["--replicas", "0"], "--replicas is 0; it must be between 1 and 64 workers"),
        (["--strategy", "static"], "--strategy is static; it must be adaptive or dynamic"),
        (["--budget", "1s"], "--budget is 1s; it must be at least 3s"),
        (["--out", "x.json"], "--out: x.json must end in .yaml"),
        (["--out", "nowhere/x.yaml"], "there is no directory nowhere"),
        (["--model", "tiny"], "--model is given; it says nothing about a callable, leave it out with --callable"),
        (["--workers", "2"], "--workers is given; it says nothing about a callable"),
    ],
)
def test_wrong_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, content in {
        "some_functions.py": FUNCTIONS,
        "needs_more.py": "import not_installed_here",
        "raises_it.py": "raise RuntimeError('no licence')",
        "good.jsonl": '"text"\n5\n',
        "empty.jsonl": "\n  \n",
        "broken.jsonl": '"a"\n\nnope\n',
        "digits.jsonl": "9" * 5000 + "\n",
    }.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "latin.jsonl").write_bytes(b'"\xe9"\n')
    given = {"--callable": "some_functions:f", "--inputs": "good.jsonl"}
    usual = [part for option, value in given.items() if option not in arguments for part in (option, value)]
    assert run(["profile", *usual, *arguments]) == 2
    told = capsys.readouterr().err
    assert text in told and told.count("\n") == 1
    assert not list(tmp_path.glob("*.yaml"))


def test_options_of_a_callable_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "--inputs", "x.jsonl"]) == 2
    assert "--inputs is given without --callable; add --callable package.module:function" in capsys.readouterr().err
    assert run(["profile", "--callable", "json:loads"]) == 2
    assert "--inputs is missing" in capsys.readouterr().err


def test_what_was_only_simulated_is_known_beside_what_was_measured(made: CallableProfile, tmp_path: Path) -> None:
    place = tmp_path / "embed.yaml"
    measured = made.model_copy(update={"points": (made.points[0].model_copy(update={"source": "measured"}),)})
    assert not unmeasured_beside(place, made), "none is there"
    save_callable_profile(made, place)
    assert not unmeasured_beside(place, made), "nor was that measured"
    save_callable_profile(measured, place)
    assert unmeasured_beside(place, made) and not unmeasured_beside(place, measured)
    save_profile(sample_profile(), place)
    assert unmeasured_beside(place, made), "of a model"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_stopped_before_it_measured_leaves_what_was_measured(
    made: CallableProfile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    as_json: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "some_functions.py").write_text(FUNCTIONS)
    (tmp_path / "good.jsonl").write_text('"text"\n')
    slo = SLO(e2e_ms=400)
    ticking, load = Ticking(0.020, 0.002), OfferedLoad(200.0, 1, 5.0, 1.0)
    cost = calibrated(ticking, subject(ticking))
    runs = [simulated(s, cost, [1], load, slo) for s in (AS_IT_COMES, ONE_AT_A_TIME)]
    found = findings(cost, slo, 200.0, runs, capacity=380.0, capacity_size=32)
    found.stopped = True
    session = SimpleNamespace(run=lambda: found)
    monkeypatch.setattr("autotune.profiling.callable.CallableSession", lambda *given, **named: session)
    measured = made.model_copy(update={"points": (made.points[0].model_copy(update={"source": "measured"}),)})
    save_callable_profile(measured, tmp_path / "embed.yaml")
    before = (tmp_path / "embed.yaml").read_bytes()
    arguments = [
        "profile",
        "--callable",
        "some_functions:f",
        "--inputs",
        "good.jsonl",
        "--slo",
        "e2e=400ms",
        "--out",
        "embed.yaml",
    ]
    assert run([*arguments, *(["--json"] if as_json else [])]) == 130
    assert (tmp_path / "embed.yaml").read_bytes() == before
    told = capsys.readouterr()
    assert "embed.yaml stays as it was. Run the same command to go on." in " ".join((told.out + told.err).split())
    if as_json:
        assert json.loads(told.out) == {"file": "embed.yaml", "status": "stopped"}
