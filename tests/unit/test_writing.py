"""Files are written whole or not at all: full disks, read-only ones, kills, links, and readers meanwhile."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from autotune.profile import load_profile, save_profile
from autotune.writing import replaceable, writable, write_whole
from runtime.errors import InputError
from tests.failing_disks import ROOT, on_small_disk, without_privileges
from tests.sample_profile import full_profile

TRY = """
from autotune.writing import write_whole
from runtime.errors import InputError
def attempt(path, content):
    try:
        write_whole(path, content)
    except InputError as error:
        return str(error).replace(str(folder), '')
def state():
    return {path.name: len(path.read_bytes()) for path in folder.iterdir()}
"""


def test_a_disk_that_fills_while_writing(tmp_path: Path) -> None:
    told, before, then, after = on_small_disk(
        tmp_path,
        TRY + "path = folder / 'x.yaml'; attempt(path, 'old')\n"
        "told = attempt(path, 'n' * 300_000); before = state()\n"
        "then = attempt(path, 'newer')\n"
        "print(json.dumps([told, before, then, state()]))",
    )
    assert told == "/x.yaml: cannot be written (No space left on device)"
    assert before == {"x.yaml": 3}, "the old file, and nothing beside it"
    assert then is None and after == {"x.yaml": 5}


def test_files_that_belong_together_are_all_replaced_or_none(tmp_path: Path) -> None:
    told, sizes, after = on_small_disk(
        tmp_path,
        TRY + "from autotune.writing import write_together\n"
        "write_whole(folder / 'a', 'old'); write_whole(folder / 'b', 'older')\n"
        "try:\n    write_together({folder / 'a': 'new', folder / 'b': 'n' * 300_000})\n"
        "except InputError as error:\n    told = str(error).replace(str(folder), '')\n"
        "before = state(); write_together({folder / 'a': 'n', folder / 'b': 'nn', folder / 'c': b'nnn'})\n"
        "print(json.dumps([told, before, state()]))",
    )
    assert told == "/b: cannot be written (No space left on device)"
    assert sizes == {"a": 3, "b": 5} and after == {"a": 1, "b": 2, "c": 3}


def test_a_disk_without_a_byte_left(tmp_path: Path) -> None:
    told, sizes = on_small_disk(
        tmp_path,
        TRY + "path = folder / 'x.yaml'; attempt(path, 'old')\n"
        "file = open(folder / 'filler', 'wb', buffering=0)\n"
        "try:\n    while True: file.write(b'x' * 4096)\nexcept OSError: pass\n"
        "print(json.dumps([attempt(path, 'new'), {n: s for n, s in state().items() if n != 'filler'}]))",
    )
    assert told == "/x.yaml: cannot be written (No space left on device)" and sizes == {"x.yaml": 3}


def test_a_disk_that_is_read_only(tmp_path: Path) -> None:
    told, new, sizes = on_small_disk(
        tmp_path,
        TRY + "path = folder / 'x.yaml'; attempt(path, 'old'); read_only()\n"
        "print(json.dumps([attempt(path, 'new'), attempt(folder / 'y.yaml', 'new'), state()]))",
    )
    assert told == "/x.yaml: cannot be written (Read-only file system)"
    assert new == "/y.yaml: cannot be written (Read-only file system)"
    assert sizes == {"x.yaml": 3}


@pytest.mark.slow
def test_every_verb_says_of_a_read_only_disk_that_it_is(tmp_path: Path) -> None:
    told = on_small_disk(
        tmp_path,
        "import contextlib, io\nfrom autotune.cli.main import run\n(folder / 'old.yaml').write_text('')\nread_only()\n"
        "told = []\n"
        "for verb, name in (('profile --cpu', 'x.yaml'), ('profile --cpu', 'old.yaml'), ('report cpu-2core-tiny', 'x.html'),\n"
        "                  ('export cpu-2core-tiny --to vllm --model a/b --allow-lossy', 'x.yaml'), ('bench --cpu', 'y.html')):\n"
        "    errors = io.StringIO()\n"
        "    with contextlib.redirect_stderr(errors):\n"
        "        code = run([*verb.split(), '--out', str(folder / name)])\n"
        "    told.append([code, errors.getvalue().replace(str(folder), '')])\n"
        "print(json.dumps(told))",
    )
    names = ("x.yaml", "old.yaml", "x.html", "x.yaml", "y.html")
    assert told == [[2, f"error: --out: /{name} cannot be written (Read-only file system)\n"] for name in names]


def test_folders_and_files_one_may_not_write() -> None:
    with tempfile.TemporaryDirectory() as name:
        locked, mine = Path(name) / "locked", Path(name) / "open"
        for folder in (locked, mine):
            folder.mkdir()
            (folder / "x.yaml").write_text("old")
            os.chmod(folder / "x.yaml", 0o444)
        os.chmod(name, 0o755)
        os.chmod(locked, 0o555)
        os.chmod(mine, 0o777)
        code = TRY + f"from autotune.writing import writable\nfolder = Path({name!r}); drop()\n"
        code += (
            "names = ('locked/x.yaml', 'locked/y.yaml', 'open/x.yaml'); refused = []\n"
            "for one in names:\n"
            "    try: writable('--out', folder / one)\n"
            "    except InputError as error: refused.append(str(error).replace(str(folder), ''))\n"
            "print(json.dumps([[attempt(folder / one, 'new') for one in names], refused]))"
        )
        names = "locked/x.yaml", "locked/y.yaml", "open/x.yaml"
        told, refused = without_privileges(code)
        assert told == [f"/{one}: cannot be written (Permission denied)" for one in names]
        assert refused == [f"--out: /{one} cannot be written (Permission denied)" for one in names]
        assert sorted(str(p.relative_to(name)) for p in Path(name).rglob("*.*")) == ["locked/x.yaml", "open/x.yaml"]
        os.chmod(locked, 0o755)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p.mkdir(), "Is a directory"),
        (lambda p: os.mkfifo(p), "not a regular file"),
        (lambda p: p.symlink_to(p), "Too many levels of symbolic links"),
        (lambda p: p.symlink_to(p.parent / "no-folder" / "x"), "No such file or directory"),
        (lambda p: p.symlink_to(p.parent), "Is a directory"),
    ],
    ids=["directory", "pipe", "loop", "dangling", "link to a directory"],
)
def test_targets_that_are_no_files(tmp_path: Path, make: object, says: str) -> None:
    path = tmp_path / "x.yaml"
    make(path)  # type: ignore[operator]
    before = os.lstat(path)
    with pytest.raises(InputError) as caught:
        write_whole(path, "new")
    assert str(caught.value) == f"{path}: cannot be written ({says})"
    assert os.lstat(path).st_ino == before.st_ino and len(list(tmp_path.iterdir())) == 1


def test_names_that_cannot_be(tmp_path: Path) -> None:
    for name in ("a\0b", "x" * 300):
        with pytest.raises(InputError, match="cannot be written"):
            write_whole(tmp_path / name, "new")
    assert list(tmp_path.iterdir()) == []


def test_an_option_with_a_name_that_is_too_long_is_refused_before_there_is_work_to_lose(tmp_path: Path) -> None:
    path = tmp_path / f"{'a' * 300}.yaml"
    with pytest.raises(InputError) as caught:
        writable("--out", path)
    assert str(caught.value) == f"--out: {path} cannot be written (File name too long)"
    replaceable("--out", path, lambda content: False, "is no profile")


def test_a_link_stays_one_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "r.yaml", tmp_path / "x.yaml"
    real.write_text("old")
    link.symlink_to(real)
    write_whole(link, "new")
    assert link.is_symlink() and real.read_text() == "new" and not real.is_symlink()
    dangling = tmp_path / "d.yaml"
    dangling.symlink_to(tmp_path / "real" / "later.yaml")
    write_whole(dangling, "new")
    assert dangling.is_symlink() and (tmp_path / "real" / "later.yaml").read_text() == "new"


def test_modes_are_the_usual_one_for_new_files_and_kept_for_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    before = os.umask(0o027)
    try:
        write_whole(path, "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    os.chmod(path, 0o600)
    write_whole(path, "newer")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "what was private stays private"


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
def test_killed_at_the_worst_moments_the_old_file_stands(tmp_path: Path, call: str) -> None:
    path = tmp_path / "x.yaml"
    save_profile(full_profile(), path)
    before = path.read_bytes()
    code = (
        f"import os, signal, sys\nfrom pathlib import Path\nfrom autotune.writing import write_whole\n"
        f"os.{call} = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\nwrite_whole(Path(sys.argv[1]), 'new' * 10000)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == before and load_profile(path) == full_profile()
    (left,) = [p for p in tmp_path.iterdir() if p != path]
    assert left.name.startswith(".x.yaml.") and left.name.endswith(".tmp")
    write_whole(path, "new")
    assert left.exists(), "it may be another process at work"
    os.utime(left, (time.time() - 3600,) * 2)
    write_whole(tmp_path / "y.yaml", "other")
    assert left.exists(), "only leftovers of the file that is written are its business"
    write_whole(path, "newer")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.yaml", "y.yaml"]


def test_killed_at_random_moments_a_reader_finds_one_or_the_other(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    write_whole(path, "a" * 200_000)
    code = (
        "import sys\nfrom pathlib import Path\nfrom autotune.writing import write_whole\nprint('go', flush=True)\n"
        "while True:\n    for c in 'ab':\n        write_whole(Path(sys.argv[1]), c * 200_000)"
    )
    dice = random.Random(5)
    for _ in range(4):
        words = [sys.executable, "-c", code, str(path)]
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"go\n"
            threading.Event().wait(dice.uniform(0, 0.05))
            process.kill()
        assert path.read_text() in ("a" * 200_000, "b" * 200_000)


def test_whoever_reads_meanwhile_sees_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    write_whole(path, "a" * 50_000)
    stop = threading.Event()

    def write(letter: str) -> None:
        while not stop.is_set():
            write_whole(path, letter * 50_000)

    writers = [threading.Thread(target=write, args=(letter,)) for letter in "bc"]
    for writer in writers:
        writer.start()
    try:
        for _ in range(200):
            assert path.read_text() in {letter * 50_000 for letter in "abc"}
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert list(tmp_path.iterdir()) == [path]
