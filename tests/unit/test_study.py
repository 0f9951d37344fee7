"""The study survives its process: nothing lost, nothing taken for something else."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from autotune.profiling.study import SweepStudy, differences, open_study
from runtime.errors import InputError
from tests.unit.profiled_machine import no_locks

IDENTITY = {"model": {"name": "tiny", "dtype": "bfloat16"}, "slo": None, "seed": 0}


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "a.journal"


def measure(study: SweepStudy, count: int, log: list[int] | None = None) -> list[dict[str, Any]]:
    """``count`` measurements under the keys "0", "1", …; ``log`` gets the numbers of those that were really made."""

    def run(number: int) -> dict[str, Any]:
        if log is not None:
            log.append(number)
        return {"goodput": float(number)}

    return [study.measured(str(number), lambda number=number: run(number)) for number in range(count)]


def measured(study: SweepStudy) -> list[str]:
    return [key for key, _ in study.measurements.results()]


def _die_in_a_measurement(journal: Path) -> None:
    with open_study(journal, IDENTITY) as study:
        study.put("setup", {"rate": 3})
        measure(study, 1)
        study.measured("1", lambda: os._exit(9))  # no handler, no clean-up: as if killed


@pytest.mark.slow
def test_a_measurement_cut_short_by_death_is_made_again(journal: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_die_in_a_measurement, args=(journal,))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    journal.with_name("a.journal.lock").symlink_to(journal)  # what a version that locked as Optuna does may have left
    with journal.open("ab") as file:
        file.write(b'{"op_code": 8, "half a l')
    log: list[int] = []
    with open_study(journal, IDENTITY) as study:
        assert study.get("setup") == {"rate": 3}
        assert measured(study) == ["0"]
        assert measure(study, 3, log) == [{"goodput": 0.0}, {"goodput": 1.0}, {"goodput": 2.0}]
    assert log == [1, 2]
    with open_study(journal, IDENTITY) as study:
        assert measured(study) == ["0", "1", "2"]


def test_nothing_stands_beside_the_journal_even_while_it_is_written(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed in that moment would leave it there, and the next one would have to wait for it."""
    seen, sync = set[str](), os.fsync

    def look(file: int) -> None:
        seen.update(path.name for path in journal.parent.iterdir())
        sync(file)

    monkeypatch.setattr(os, "fsync", look)
    with open_study(journal, IDENTITY) as study:
        measure(study, 2)
    assert seen == {journal.name} == {path.name for path in journal.parent.iterdir()}


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], None]:
    """``kill_at(n, torn)``: the n-th write from now is the first not to happen; ``torn``: half of it still does."""
    real, state = JournalFileBackend.append_logs, {"left": 10**9, "torn": False}

    def append(journal: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
        state["left"] -= 1
        if state["left"] >= 0:
            return real(journal, logs)
        if state["left"] == -1 and state["torn"]:
            path = Path(journal._file_path)
            size = path.stat().st_size
            real(journal, logs)
            os.truncate(path, (size + path.stat().st_size) // 2)
        raise Killed

    def arm(writes: int, torn: bool) -> None:
        state.update(left=writes, torn=torn)

    monkeypatch.setattr(JournalFileBackend, "append_logs", append)
    return arm


def test_killed_at_any_write_nothing_is_lost_or_repeated(tmp_path: Path, kill_at: Callable[[int, bool], None]) -> None:
    with open_study(tmp_path / "whole.journal", IDENTITY) as study:
        expected = measure(study, 4)
    writes = len((tmp_path / "whole.journal").read_bytes().splitlines())
    assert writes > 4 * 3
    for at in range(writes):
        journal, log = tmp_path / f"{at}.journal", []
        kill_at(at, at % 2 == 0)
        with pytest.raises(Killed), open_study(journal, IDENTITY) as study:
            measure(study, 4, log)
        written = journal.read_bytes().count(b'"result":{') - (at % 2 == 0 and b'"result":{' in torn(journal))
        kill_at(10**9, False)
        with open_study(journal, IDENTITY) as study:
            assert measure(study, 4, log) == expected, f"killed at write {at}"
            assert measured(study) == ["0", "1", "2", "3"]
        assert all(log.count(number) == 1 for number in range(written)), f"killed at write {at}: its result was written"
        assert len(log) <= 5


def torn(journal: Path) -> bytes:
    """What follows the last whole line."""
    return journal.read_bytes().rpartition(b"\n")[2]


def test_what_is_known_may_be_asked_while_something_is_measured(journal: Path) -> None:
    with open_study(journal, IDENTITY) as study:
        measure(study, 1)
        requested = study.measured("1", lambda: {"known": [study.measurements.known(key) for key in ("0", "1", "2")]})
        assert requested == {"known": [True, True, False]}
        assert measured(study) == ["0", "1"]


def test_another_question_is_refused_and_the_difference_named(journal: Path) -> None:
    with open_study(journal, IDENTITY) as study:
        measure(study, 1)
    other = {"model": {"name": "tiny", "dtype": "float32"}, "slo": "ttft=1s", "seed": 0}
    with pytest.raises(InputError) as caught, open_study(journal, other):
        pass
    text = str(caught.value)
    assert "model.dtype was bfloat16, is now float32; slo was not given, is now ttft=1s" in text
    assert "--fresh" in text and "--out" in text
    with open_study(journal, IDENTITY) as study:
        assert len(measured(study)) == 1
    with open_study(journal, other, fresh=True) as study:
        assert measured(study) == []


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


def test_a_file_system_without_locks_is_named(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_locks(monkeypatch)
    with pytest.raises(InputError) as caught, open_study(journal, IDENTITY):
        pass
    assert str(caught.value) == (
        f"{journal}: this file system has no locks (Function not implemented); put --out, or --study, on a local disk"
    )
    assert not journal.exists()


def test_files_that_are_no_studies(journal: Path, tmp_path: Path) -> None:
    for content in (
        b"this is not a journal\nat all\n",
        b"no line end",
        b"\x00\xff\xfe" * 500,
        b"[1, 2]\n",
        b'{"a": 1}\n',
        b'{"a": 1}\n{"a": 2',
    ):
        journal.write_bytes(content)
        for fresh in (False, True):
            with (
                pytest.raises(InputError, match="is no journal that autotune wrote; name another --study") as caught,
                open_study(journal, IDENTITY, fresh=fresh),
            ):
                pass
            assert "--fresh" not in str(caught.value), "it would not help"
            assert journal.read_bytes() == content
    with pytest.raises(InputError, match="cannot be written"), open_study(tmp_path / "no" / "a.journal", IDENTITY):
        pass
    with pytest.raises(InputError, match="cannot be written"), open_study(tmp_path, IDENTITY):
        pass


def test_another_programs_journal_is_left_alone(journal: Path) -> None:
    storage = JournalStorage(JournalFileBackend(str(journal)))
    optuna.create_study(storage=storage, study_name="someone else's")
    before = journal.read_bytes()
    for fresh in (False, True):
        with (
            pytest.raises(InputError, match="is no journal that autotune wrote; name another --study"),
            open_study(journal, IDENTITY, fresh=fresh),
        ):
            pass
        assert journal.read_bytes() == before


def test_fresh_empties_a_journal_of_ours_that_cannot_be_read(journal: Path) -> None:
    with open_study(journal, IDENTITY) as study:
        measure(study, 2)
    whole = journal.read_bytes()
    for content in (whole[:100], whole.replace(b"op_code", b"xx_code", 1), whole.replace(b"}", b"#", 1)):
        journal.write_bytes(content)
        with open_study(journal, IDENTITY, fresh=True) as study:
            assert measured(study) == []


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_an_empty_file_is_a_new_study(journal: Path) -> None:
    journal.touch()
    with open_study(journal, IDENTITY) as study:
        measure(study, 1)
    with open_study(journal, IDENTITY) as study:
        assert len(measured(study)) == 1


@pytest.mark.parametrize(
    "damage", ["garbled", "zeros", "another line's middle", "a line twice", "lines missing", "halved", "a digit"]
)
def test_a_journal_damaged_in_the_middle_is_refused_and_left_as_it_is(journal: Path, damage: str) -> None:
    with open_study(journal, IDENTITY) as study:
        measure(study, 4)
    lines = journal.read_bytes().splitlines(keepends=True)
    finish = next(n for n, line in enumerate(lines) if b'"state":1' in line)
    middle = lines[finish]
    lines[finish : finish + 1] = {
        "garbled": [middle[:10] + b"#" + middle[11:]],
        "zeros": [b"\0" * len(middle)],
        "another line's middle": [middle[:-1] + lines[2]],
        "a line twice": [middle, middle],
        "lines missing": [],
        "a digit": [middle.replace(b"[0.0]", b"[7.0]")],
        "halved": [middle[: len(middle) // 2] + b"\n"],
    }[damage]
    if damage == "lines missing":
        del lines[1:3]
    journal.write_bytes(b"".join(lines))
    with pytest.raises(InputError, match="is not a readable study") as caught, open_study(journal, IDENTITY):
        pass
    assert "--fresh" in str(caught.value) and "\n" not in str(caught.value)
    if damage in ("garbled", "zeros", "halved", "a digit"):
        assert f"line {finish + 1} is damaged" in str(caught.value)
    assert journal.read_bytes() == b"".join(lines)


@pytest.fixture
def small_files() -> Iterator[Callable[[int | None], None]]:
    """``small_files(n)``: no file of this process may grow past ``n`` bytes, as on a disk that is full (None: as before)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before if size is None else (size, before[1]))

    yield limit
    limit(None)


@pytest.mark.parametrize("bytes_left", [0, 1, 100, 2000, 2001, 2345])
def test_a_full_disk_is_said_and_nothing_is_lost(
    journal: Path, bytes_left: int, small_files: Callable[[int | None], None]
) -> None:
    log: list[int] = []
    if bytes_left >= 2000:
        with open_study(journal, IDENTITY) as study:
            measure(study, 1, log)
        bytes_left += journal.stat().st_size - 2000
    small_files(bytes_left)
    with (
        pytest.raises(InputError, match="cannot be written \\(File too large\\)"),
        open_study(journal, IDENTITY) as study,
    ):
        measure(study, 6, log)
    small_files(None)
    assert not journal.exists() or journal.read_bytes().endswith(b"\n"), "whole lines, or nothing at all"
    with open_study(journal, IDENTITY) as study:
        kept = measured(study)
        measure(study, 6, log)
        assert measured(study) == ["0", "1", "2", "3", "4", "5"]
    assert all(log.count(int(key)) == 1 for key in kept)


def test_a_journal_removed_while_it_is_open(journal: Path) -> None:
    with (
        pytest.raises(InputError, match=r"a\.journal: cannot be written \(No such file"),
        open_study(journal, IDENTITY) as study,
    ):
        journal.unlink()
        study.put("a", 1)
    assert not journal.exists()


@pytest.mark.parametrize(
    ("finished", "requested", "exhausted"),
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
    journal: Path,
    finished: tuple[int | None, float | None],
    requested: tuple[int | None, float | None],
    exhausted: bool,
) -> None:
    with open_study(journal, IDENTITY) as study:
        measure(study, 1)
        assert not study.exhausted(*finished)
        study.finish(*finished)
        assert study.exhausted(*requested) is exhausted
        assert measured(study.restarted(IDENTITY)) == []
    with open_study(journal, IDENTITY) as study:
        assert measured(study) == [] and study.get("finished") is None


def test_differences_of_equals() -> None:
    assert differences(IDENTITY, dict(IDENTITY)) == []


def test_what_a_study_from_before_does_not_say_is_not_compared() -> None:
    """Studies of the same version began without CPU features and versions of other software."""
    before = {"machine": {"cpu": "A CPU"}, "seed": 0}
    now = {"machine": {"cpu": "A CPU", "flags": ["sve2"]}, "seed": 0, "torch": "2.13", "transformers": "5"}
    assert differences(before, now) == differences(now, before) == []
    assert differences(before, now | {"seed": 1}) == ["seed was 0, is now 1"]
    other = now | {"torch": "2.14", "machine": {"cpu": "A CPU", "flags": ["sve"]}}
    assert differences(now, other) == ["machine.flags was ['sve2'], is now ['sve']", "torch was 2.13, is now 2.14"]


def test_an_arm_cpu_that_had_no_numbers_is_any_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    before, now, other = ({"machine": {"cpu": cpu}} for cpu in ("aarch64", "CPU 0x41 0xd40", "CPU 0xc0 0xac3"))
    assert differences(before, now) == differences(now, before) == []
    assert differences(now, other) == ["machine.cpu was CPU 0x41 0xd40, is now CPU 0xc0 0xac3"]
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert differences(before, now) == ["machine.cpu was aarch64, is now CPU 0x41 0xd40"]


def test_more_simulated_trials_extend_a_finished_study(journal: Path) -> None:
    with open_study(journal, IDENTITY) as study:
        measure(study, 2)
        study.put("spent", {"hardware_s": 9.0, "simulating_s": 9.0})
        study.finish(None, 60.0, 240)
        assert study.exhausted(None, 60.0, 240) and study.exhausted(None, 30.0, 100)
        study.extend(60.0, 240)
        assert study.get("finished") is not None and study.get("spent")["hardware_s"] == 9.0
        assert not study.exhausted(None, 60.0, 400)
        study.spend("a session", {"hardware_s": 1.0, "simulating_s": 2.0})
        assert study.spent() == {"hardware_s": 10.0, "simulating_s": 11.0}
        study.extend(60.0, 400)
        assert not any(study.spent().values()), "what it spent on the trials before is not taken from those to come"
    with open_study(journal, IDENTITY) as study:
        assert not study.exhausted(None, 60.0, 400) and len(measured(study)) == 2


def test_what_was_measured_before_an_extension_is_known_from_then_on(journal: Path) -> None:
    with open_study(journal, IDENTITY) as study:
        study.measured("calibration", lambda: {"run": 0})
        study.measured("run/a", lambda: {"run": 1})
        study.extend(90.0, 240)
        assert not study.earlier, "it goes on with what it was begun with"
        study.finish(None, 60.0, 240)
        study.extend(60.0, 240)
        assert not study.earlier
        study.extend(90.0, 240)
        study.measured("run/b", lambda: {"run": 2})
    with open_study(journal, IDENTITY) as study:
        study.extend(90.0, 240)  # after it was interrupted
        assert study.earlier == {"run/a"}
        study.finish(None, 90.0, 240)
        study.extend(90.0, 400)
        assert study.earlier == {"run/a", "run/b"}
