"""The study survives its process: nothing lost, nothing taken for something else."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from autotune.profiling.space import make_space
from autotune.profiling.study import STALE, SweepStudy, differences, open_study
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs

SPACE = make_space(KnobLimits())
IDENTITY = {"model": {"name": "tiny", "dtype": "bfloat16"}, "slo": None, "seed": 0}
GIVEN = {"max_batch_size": 8, "max_wait_ms": 0.0, "token_budget": 64, "chunk_size": 64}


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "a.journal"


def trial(study: SweepStudy, value: float) -> Knobs:
    asked, _, knobs = study.ask(SPACE, 0)
    study.done(asked, value, {"goodput": value})
    return knobs


def test_it_goes_on_where_it_stopped_with_the_same_proposals(journal: Path, tmp_path: Path) -> None:
    with open_study(tmp_path / "whole.journal", IDENTITY) as study:
        expected = [trial(study, float(i % 5)) for i in range(12)]
    found: list[Knobs] = []
    for part in range(4):
        with open_study(journal, IDENTITY) as study:
            found += [trial(study, float((3 * part + i) % 5)) for i in range(3)]
            assert len(study.completed()) == 3 * (part + 1)
    assert found == expected
    assert [t.user_attrs["result"]["goodput"] for t in study.completed()] == [float(i % 5) for i in range(12)]


def _die_in_a_trial(journal: Path) -> None:
    with open_study(journal, IDENTITY) as study:
        study.put("setup", {"rate": 3})
        study.enqueue("fitted", GIVEN, Knobs(8, 0, 64, 64))
        study.enqueue("next", GIVEN | {"token_budget": 128})
        trial(study, 1.0)
        study.ask(SPACE, 0)
        os._exit(9)  # no handler, no clean-up: as if killed


def test_a_trial_cut_short_by_death_fails_and_is_tried_again(journal: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_die_in_a_trial, args=(journal,))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    journal.with_name("a.journal.lock").symlink_to(journal)  # what Optuna leaves when killed while it appends
    with journal.open("ab") as file:
        file.write(b'{"op_code": 8, "half a l')
    with open_study(journal, IDENTITY) as study:
        assert study.get("setup") == {"rate": 3}
        assert len(study.completed()) == 1
        assert study.failures() == [(1, STALE)]
        assert study.waiting() == 1
        again, label, knobs = study.ask(SPACE, 0)
        assert (label, knobs) == ("next", Knobs(8, 0, 64 * 2, 64))
        study.done(again, 2.0, {})
    with open_study(journal, IDENTITY) as study:
        assert len(study.completed()) == 2


def test_another_question_is_refused_and_the_difference_named(journal: Path) -> None:
    with open_study(journal, IDENTITY) as study:
        trial(study, 1.0)
    other = {"model": {"name": "tiny", "dtype": "float32"}, "slo": "ttft=1s", "seed": 0}
    with pytest.raises(InputError) as caught, open_study(journal, other):
        pass
    text = str(caught.value)
    assert "model.dtype was bfloat16, is now float32; slo was not given, is now ttft=1s" in text
    assert "--fresh" in text and "--out" in text
    with open_study(journal, IDENTITY) as study:
        assert len(study.completed()) == 1
    with open_study(journal, other, fresh=True) as study:
        assert len(study.completed()) == 0


def test_only_one_process_has_it_open(journal: Path) -> None:
    with (
        open_study(journal, IDENTITY),
        pytest.raises(InputError, match="another autotune is profiling into it"),
        open_study(journal, IDENTITY),
    ):
        pass
    with open_study(journal, IDENTITY):
        pass
    assert [p.name for p in journal.parent.iterdir()] == ["a.journal"]


def test_files_that_are_no_studies(journal: Path, tmp_path: Path) -> None:
    journal.write_text("this is not a journal\nat all\n")
    with pytest.raises(InputError, match="not a readable study"), open_study(journal, IDENTITY):
        pass
    with pytest.raises(InputError, match="cannot be written"), open_study(tmp_path / "no" / "a.journal", IDENTITY):
        pass


def test_a_failure_keeps_its_cause_and_is_no_score(journal: Path) -> None:
    with open_study(journal, IDENTITY) as study:
        asked, _, _ = study.ask(SPACE, 0)
        study.failed(asked, "out of memory")
        assert study.completed() == []
        assert study.failures() == [(0, "out of memory")]
        assert study.waiting() == 0
        asked, _, knobs = study.ask(SPACE, 0)
        study.failed(asked, "interrupted", again=True)
        assert study.ask(SPACE, 0)[2] == knobs


def test_a_yardstick_outside_the_space_is_measured_as_it_is(journal: Path) -> None:
    vllm = Knobs(1024, 0, 8192, 8192)
    with open_study(journal, IDENTITY) as study:
        study.enqueue("vLLM defaults", SPACE.params(vllm), vllm)
        _, label, knobs = study.ask(SPACE, 0)
        assert (label, knobs) == ("vLLM defaults", vllm)
        assert not SPACE.contains(vllm)


@pytest.mark.parametrize(
    ("finished", "asked", "exhausted"),
    [
        ((None, 60.0), (None, 60.0), True),
        ((None, 60.0), (None, 30.0), True),
        ((None, 60.0), (None, 90.0), False),
        ((None, 60.0), (10, None), False),
        ((10, None), (10, None), True),
        ((10, None), (20, None), False),
        ((10, None), (5, None), True),
        ((10, None), (10, 60.0), True),
        ((10, 60.0), (10, None), False),
    ],
)
def test_a_finished_study_goes_on_only_if_more_is_asked(
    journal: Path, finished: tuple[int | None, float | None], asked: tuple[int | None, float | None], exhausted: bool
) -> None:
    with open_study(journal, IDENTITY) as study:
        trial(study, 1.0)
        assert not study.exhausted(*finished)
        study.finish(*finished)
        assert study.exhausted(*asked) is exhausted
        assert study.restarted(IDENTITY).completed() == []
    with open_study(journal, IDENTITY) as study:
        assert study.completed() == [] and study.get("finished") is None


def test_differences_of_equals() -> None:
    assert differences(IDENTITY, dict(IDENTITY)) == []
