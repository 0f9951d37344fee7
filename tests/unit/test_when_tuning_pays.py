"""When tuning pays: a cell is searched and served as the page says, and the page says what was found."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autotune.engines.defaults import vllm_defaults
from benchmarks.when_tuning_pays import __main__ as command
from benchmarks.when_tuning_pays import play
from benchmarks.when_tuning_pays.cells import Cell, cells
from benchmarks.when_tuning_pays.page import BEGIN, END, IMAGE, bottleneck, figures, needed
from benchmarks.when_tuning_pays.picture import drawing
from benchmarks.when_tuning_pays.play import (
    ADMISSION,
    BOTH,
    CARRIED,
    CONTROLLER,
    DEFAULTS,
    LADDER,
    ORDER,
    PARTS,
    SETTING,
    Plan,
    Runs,
    Served,
    accepted,
    best_at,
    digest,
    highest,
    searched,
    settings,
)
from runtime.errors import InputError
from runtime.knobs import Knobs

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[2] / "docs" / "when-tuning-pays.md"
CODE = ["--truth", "h100-llama3-8b", "--workload", "code", "--slo", "strict", "--variant", "graphs"]
SHORT = Plan(chosen_on=(1,), reported=(11,), requests=60, least_s=8.0)
SMALL, LARGE = Knobs(256, 0, 2048, 2048), Knobs(1024, 0, 8192, 8192)


@pytest.mark.parametrize(
    ("device", "gib", "start"),
    [
        ("NVIDIA A100-SXM4-80GB", 80, SMALL),
        ("H100", 80, LARGE),
        ("RTX 4090", 24, SMALL),
        ("RTX PRO 6000", 96, LARGE),
        ("B200", 178, Knobs(1024, 0, 16384, 16384)),
    ],
)
def test_vllm_starts_by_memory_and_on_an_a100_small(device: str, gib: float, start: Knobs) -> None:
    assert vllm_defaults(device, gib) == start


def test_every_truth_is_asked_with_two_workloads_and_two_slos_and_half_of_them_with_costly_steps() -> None:
    every = list(cells())
    assert len(every) == len(set(every)) == (8 + 4) * 2 * 2
    assert len({cell.truth for cell in every if cell.variant == "costly"}) == 4
    assert Cell("graphs", "a100-llama2-7b", "chat", "strict").title == "A100, Llama-2-7B"
    assert Cell("graphs", "h200-llama3-8b-fp8", "chat", "strict").title == "H200, Llama-3-8B fp8"
    assert Cell("graphs", "h100-mixtral-8x7b-tp2", "chat", "strict").title == "2 × H100, Mixtral-8x7B"


def test_targets_are_multiplied_where_a_request_alone_takes_most_of_them() -> None:
    for cell in cells(["graphs"], slos=["strict"]):
        scenario, (ttft, tpot) = cell.scenario(1.0, 10.0), cell.factors
        slo = scenario.phases[0].slo
        assert slo == cell.slo and slo.ttft_ms == 500 * ttft and slo.tpot_ms == 30 * tpot
        decode_ms = 1000 * scenario.hardware.cost().step_seconds(1, 1000)  # type: ignore[attr-defined]
        assert 30 * (tpot - 1) / 2 < decode_ms <= 30 * tpot / 2
        loose = cell._replace(slo_name="loose").slo
        assert loose.ttft_ms == 2000 * ttft and loose.tpot_ms == 100 * tpot
    factors = {cell: cell.factors for cell in cells(["graphs"], slos=["strict"])}
    assert factors[Cell("graphs", "h100-llama3-8b", "chat", "strict")] == (1, 1)
    for cell, (ttft, _) in factors.items():
        assert ttft >= factors[cell._replace(workload="chat")][0], "code has the longer prompts"


@pytest.mark.parametrize("start", [SMALL, LARGE])
def test_settings_are_those_that_vllm_accepts_the_defaults_first(start: Knobs) -> None:
    every = settings(start)
    assert every[0] == start and len(every) == len(set(every)) == 16
    assert all(knobs.token_budget >= knobs.max_batch_size for knobs in every)
    assert {knobs.max_batch_size for knobs in every[: 4 if start == LARGE else 6]} == {start.max_batch_size}


def test_what_is_carried_is_carried_and_the_next_rung_is_not() -> None:
    runs = Runs(Cell("graphs", "rtx4090-llama3-8b", "code", "loose"), SHORT)
    found = highest(runs, [SMALL, Knobs(64, 0, 256, 256)], 16)
    assert found is not None
    rung, carrying = found
    rate, next_rate = (float(f"{LADDER**number:.3g}") for number in (rung, rung + 1))
    assert carrying
    for knobs in carrying:
        assert runs.met("static", knobs, rate) >= CARRIED > runs.met("static", knobs, next_rate)
    assert highest(runs, [SMALL, Knobs(64, 0, 256, 256)], -4) == found, "wherever the search begins"


def test_the_best_setting_is_no_worse_than_any_of_the_grid_and_the_defaults_where_nothing_is_to_be_gained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loose = Runs(Cell("graphs", "h100-llama3-8b", "code", "loose"), SHORT)
    assert loose.met("static", LARGE, 1.0) == 1 and best_at(loose, "static", 1.0) == LARGE
    runs = Runs(Cell("graphs", "h100-llama3-8b", "code", "strict"), SHORT)
    met = {knobs: runs.met("static", knobs, 22.0) for knobs in settings(LARGE)}
    best = best_at(runs, "static", 22.0)
    assert accepted(best) and runs.met("static", best, 22.0) > max(met.values()) > met[LARGE]
    monkeypatch.setattr(play, "local_search", lambda start, *_: start)
    assert met[best_at(runs, "static", 22.0)] == max(met.values()), "and begins with the best of the grid"


def test_slots_that_never_ran_out_make_no_difference() -> None:
    runs = Runs(Cell("graphs", "h100-llama3-8b", "code", "strict"), SHORT)
    few, many = (Knobs(batch, 0, 2048, 2048) for batch in (64, 1024))
    assert runs.outcome("static", few, 2.0, 1) == runs.outcome("static", many, 2.0, 1)
    assert not runs.outcome("static", few, 2.0, 1).full
    assert runs.met("static", few, 2.0) == runs.met("static", many, 2.0)


def test_a_kept_cell_is_of_the_defaults_and_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine behaves alike throughout."""
    cell = Cell("graphs", "h100-llama3-8b", "code", "strict")
    made = {searched("as ever", cell), searched("otherwise", cell)}
    monkeypatch.setattr(play, "_KEPT", 5)
    made.add(searched("as ever", cell))
    monkeypatch.undo()
    monkeypatch.setattr(Cell, "defaults", property(lambda self: SMALL))
    made.add(searched("as ever", cell))
    assert len(made) == 4


def served(**shares: float) -> Served:
    """A load at which the parts meet ``shares``, by their first letters; who is not named meets what the defaults do."""
    by_letter = dict(zip("dasobc", PARTS, strict=True))
    met = {part: [shares.get(letter, shares["d"])] for letter, part in by_letter.items()}
    return Served(1.0, 60.0, {}, met, {"left": 0.0, "ttft": 0.0, "tpot": 0.0}, 0.0)


@pytest.mark.parametrize(
    ("shares", "least"),
    [
        ({"d": 0.98, "c": 0.995}, DEFAULTS),
        ({"d": 0.7, "a": 0.9, "s": 0.91, "c": 0.91}, ADMISSION),
        ({"d": 0.5, "s": 0.9, "c": 0.91}, SETTING),
        ({"d": 0.5, "s": 0.8, "o": 0.95, "b": 0.96}, ORDER),
        ({"d": 0.5, "b": 0.95, "c": 0.96}, BOTH),
        ({"d": 0.5, "b": 0.9, "c": 0.96}, CONTROLLER),
    ],
)
def test_the_least_needed_is_the_first_within_two_points(shares: dict[str, float], least: str) -> None:
    assert needed(served(**shares)) == least


@pytest.mark.parametrize(
    ("missed", "kv", "named"),
    [
        ({"left": 0.01, "ttft": 0.0, "tpot": 0.01}, 0.5, ""),
        ({"left": 0.1, "ttft": 0.1, "tpot": 0.3}, 0.5, "TPOT"),
        ({"left": 0.2, "ttft": 0.1, "tpot": 0.1}, 0.5, "TTFT, KV pool full"),
        ({"left": 0.2, "ttft": 0.1, "tpot": 0.1}, 0.01, "TTFT"),
    ],
)
def test_a_bottleneck_is_what_is_missed_most(missed: dict[str, float], kv: float, named: str) -> None:
    assert bottleneck(served(d=0.5)._replace(missed=missed, kv=kv)) == named


@pytest.mark.slow
def test_a_cell_from_end_to_end_is_kept_and_not_played_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = tmp_path / "cells.json"
    assert command.main([*CODE, "--quick", "--keep", str(keep)]) == 0
    first = capsys.readouterr().out.splitlines()
    line = json.loads(first[-1])
    assert line["cells"] == 1 and 0 < line["graphs_defaults_carry"] <= 1
    assert (
        line["graphs_0.8"]["best_setting"] > 0 and line["graphs_1.2"]["controller"] > line["graphs_0.5"]["controller"]
    )
    entry = json.loads(keep.read_text())["graphs h100-llama3-8b code strict"]
    assert entry["slo"] == "ttft=500ms,tpot=30ms@99%" and entry["defaults"] == [1024, 8192]
    assert entry["carries"][SETTING] >= entry["carries"][DEFAULTS] > 0
    for load, found in entry["loads"].items():
        assert found["rate"] == pytest.approx(float(load) * entry["carries"][SETTING], abs=1e-3)
        assert set(found["met"]) == set(PARTS) and all(0 <= share <= 1 for (share,) in found["met"].values())
    assert command.main([*CODE, "--quick", "--keep", str(keep)]) == 0
    again = capsys.readouterr()
    assert again.err.startswith("1 of 1 cells were kept") and again.out.splitlines() == first
    cell = Cell("graphs", "h100-llama3-8b", "code", "strict")
    every = {digest(cell, plan) for plan in (command.QUICK, command.QUICK._replace(reported=(12,)), command.PUBLISHED)}
    assert entry["digest"] in every and len(every) == 3, "other seeds are another question"


@pytest.mark.slow
def test_an_interruption_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play, played = command.play, []

    def twice(task: command.Task, bench: object) -> object:
        if played:
            raise KeyboardInterrupt
        played.append(task)
        return play(task)

    monkeypatch.setattr(command, "play", twice)
    keep = tmp_path / "cells.json"
    arguments = [*CODE[:4], "--variant", "graphs", "--quick", "--keep", str(keep)]
    assert command.main(arguments) == 130
    assert "cells that are done are in the file" in capsys.readouterr().err
    assert list(json.loads(keep.read_text())) == [str(task.cell) for task in played]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--truth", "h100"], "--truth is h100; it must be one of a100-llama2-7b"),
        (["--workload", "azure"], "--workload is azure; it must be one of chat, code"),
        (["--slo", "1s"], "--slo is 1s; it must be one of strict, loose"),
        (["--jobs", "0"], "--jobs is 0; it must be at least 1"),
        (["--seed", "2"], "--seed is 2; it must be above 2: settings are chosen on 1 and 2"),
        (["--seed", "11", "--seed", "-1"], "--seed is -1; it must be above 2"),
        (["--keep", "nowhere/cells.json"], "--keep: nowhere/cells.json cannot be written"),
        (["--page", "README.md"], "--page: README.md must hold the lines"),
        (["--page", "README.md", "--keep", "Makefile.json"], "--page: Makefile.json lacks 48 cells"),
    ],
)
def test_bad_input_is_told_in_a_line(
    arguments: Sequence[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PAGE.parents[1])
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1


def test_the_page_and_its_picture_are_what_the_kept_cells_say() -> None:
    found, commits = command.kept(command.FILE)
    text = PAGE.read_text(encoding="utf-8")
    between = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert between == figures(found, commits), (
        f"{PAGE.name} is stale: python -m benchmarks.when_tuning_pays --page {PAGE}"
    )
    main = [one for one in found if one.cell.variant == "graphs"]
    assert (PAGE.parent / IMAGE).read_text(encoding="utf-8") == drawing(main)
    assert {tuple(served.settings) for one in found for served in one.loads.values()} == {(SETTING, BOTH)}
    assert {len(shares) for one in found for served in one.loads.values() for shares in served.met.values()} == {3}


def test_a_page_is_written_between_its_marks(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert command.main(["--page", str(page)]) == 0
    text = page.read_text()
    assert (
        text.startswith(f"before\n{BEGIN}\n\nMade with") and text.endswith(f"\n{END}\nafter\n") and "old\n" not in text
    )
    rows = re.findall(r"^\| (?:2 × )?(?:A100|H100|H200|RTX)", text, re.MULTILINE)
    assert len(rows) == (32 + 16) * 4, "each cell at three loads, and what it carries"
    picture = ElementTree.fromstring((tmp_path / IMAGE).read_text())
    assert len(picture.findall("{*}circle")) == 5 + 32 * 3 * 5
    with pytest.raises(InputError, match="there is no directory"):
        command.written(_marked(tmp_path / "bare"), *command.kept(command.FILE))


def _marked(folder: Path) -> Path:
    folder.mkdir()
    page = folder / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    return page
