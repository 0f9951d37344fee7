"""``autotune profile`` where its files cannot be written or read: one line, exit code 2, and the old files as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.failing_disks import on_small_disk
from tests.integration.llama_folder import llama_folder

pytestmark = [pytest.mark.slow, pytest.mark.beside]

SCENES = """
import contextlib, hashlib, io
from autotune.cli.main import run

words = "profile --cpu --dtype float32 --workload poisson:rate=20,prompt=24,output=6 --slo ttft=400ms,tpot=100ms --rate 20"
given = [*words.split(), "--sim-trials", "6", "--model", MODEL, "--out", str(folder / "a.yaml")]
told = []

def attempt(name, *more):
    errors = io.StringIO()
    before = state()
    said = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(said):
        code = run([*given, *more])
    after = state()
    told.append({
        "scene": name, "code": code, "error": errors.getvalue().replace(str(folder), ""), "said": said.getvalue(),
        "changed": sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n)),
    })

def state():
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.name != "filler"}

def fill():
    with open(folder / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)

shorter, longer = ("--trials", "1", "--budget", "10s"), ("--trials", "2", "--budget", "40s")
attempt("good", *shorter)
fill()
attempt("full", *longer)
attempt("full, anew", *shorter, "--fresh", "--study", str(folder / "b.journal"))
(folder / "filler").unlink()
attempt("room again", *longer)
journal = (folder / "a.journal").read_bytes()
middle = len(journal) // 2
(folder / "a.journal").write_bytes(journal[:middle] + b"####" + journal[middle + 4:])
attempt("damaged", "--trials", "3", "--budget", "60s")
(folder / "a.journal").write_bytes(journal)
read_only()
attempt("read-only", "--trials", "3", "--budget", "60s")
print(json.dumps(told))
"""


def test_every_way_a_disk_fails(tmp_path: Path) -> None:
    model, disk = llama_folder(tmp_path / "model"), tmp_path / "disk"
    disk.mkdir()
    told = on_small_disk(disk, f"MODEL = {str(model)!r}\n{SCENES}", size="2m", timeout=290)
    scenes = {scene.pop("scene"): scene for scene in told}
    assert scenes["good"]["code"] in (0, 1) and scenes["good"]["error"] == ""
    assert scenes["good"]["changed"] == ["a.journal", "a.points.jsonl", "a.yaml"]

    full = scenes["full"]
    places = [
        f"error: /a.{kind}: cannot be written (No space left on device)\n" for kind in ("journal", "points.jsonl")
    ]
    assert full["code"] == 2 and full["error"] in places, "by how much the last block of the journal still takes"
    assert set(full["changed"]) <= {"a.journal"}, "what was measured before the disk was full is kept"
    anew = scenes["full, anew"]
    assert (anew["code"], anew["error"]) == (2, "error: /b.journal: cannot be written (No space left on device)\n")
    assert anew["changed"] == []

    again = scenes["room again"]
    assert again["code"] in (0, 1) and again["error"] == "" and "measuring anew" not in again["said"]
    assert {"a.journal", "a.yaml"} <= set(again["changed"])

    damaged = scenes["damaged"]
    assert damaged["code"] == 2 and damaged["changed"] == []
    assert damaged["error"].startswith("error: /a.journal: is not a readable study: line ")
    assert "--fresh" in damaged["error"] and damaged["error"].count("\n") == 1

    locked = scenes["read-only"]
    assert locked["code"] == 2 and locked["changed"] == [] and locked["error"].count("\n") == 1
    assert "cannot be written" in locked["error"]
