"""Runs parts, each in a process with a time limit, and keeps how each ended. Nothing that a part does stops the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.part import LEFT_OUT
from benchmarks.gpu.parts import Part
from benchmarks.gpu.place import Ended, ended, read, state_file, write
from benchmarks.kept import ROOT, code_digest

FINAL: Final = ("done", "left out")
_POLL_S: Final = 0.2
_PATIENCE_S: Final = 10.0


def run_parts(
    parts: Sequence[Part], folder: Path, *, dry: bool, minutes: float, say: Callable[[str], None]
) -> tuple[bool, list[Part]]:
    """Run ``parts`` one after the other; returns whether Ctrl-C ended it, and the parts not begun: because of that, or because
    they might not end within ``minutes`` of the begin. The first is begun in any case."""
    begun = time.monotonic()
    for number, part in enumerate(parts):
        left = minutes * 60 - (time.monotonic() - begun)
        if part.limit_s > left and number:
            say(
                f"{part.name}: not begun, it may take {part.limit_s:.0f} s and {left:.0f} s are left; --resume goes on here"
            )
            return False, list(parts[number:])
        say(f"{part.name}: {part.title}")
        how = _run(part, folder, dry, say)
        say(f"{part.name}: {how.state} after {how.seconds:.0f} s{f': {how.why}' if how.why else ''}")
        if how.state == "interrupted":
            return True, list(parts[number + 1 :])
    return False, []


def _run(part: Part, folder: Path, dry: bool, say: Callable[[str], None]) -> Ended:
    file, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    for earlier in (file, state_file(folder, part.name)):
        earlier.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.part",
        part.name,
        "--out",
        str(folder),
        *(["--dry"] if dry else []),
    ]
    code, begun = code_digest(), time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(part, dry), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    follow = _Follower(log, say)
    state = ""
    try:
        while process.poll() is None and time.monotonic() - begun < part.limit_s:
            time.sleep(_POLL_S)
            follow.tell()
        if process.poll() is None:
            state = "out of time"
    except KeyboardInterrupt:
        state = "interrupted"
    _end(process)
    follow.tell()
    why = follow.why
    if not state:
        state = {0: "done", LEFT_OUT: "left out"}.get(process.returncode, "failed")
    if state == "failed" and not why:
        why = f"its process ended with {process.returncode}"
    if state == "out of time":
        why = f"it took longer than {part.limit_s:.0f} s"
    found = Ended(state, round(time.monotonic() - begun, 1), why, dry, code)
    write(state_file(folder, part.name), json.dumps(found._asdict()) + "\n")
    return found


class _Follower:
    """Tells what a part prints of its answers while it runs."""

    def __init__(self, log: Path, say: Callable[[str], None]) -> None:
        self._log, self._say, self._at, self._rest = log, say, 0, b""
        self.why = ""

    def tell(self) -> None:
        with self._log.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        self._at += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if text.startswith("> "):
                self._say(f"  {text[2:]}")
            for word in ("left out: ", "failed: ", "error: "):
                if text.startswith(word):
                    self.why = text.removeprefix(word)


def _environment(part: Part, dry: bool) -> dict[str, str]:
    found = dict(os.environ)
    found["PYTHONPATH"] = f"{ROOT}{os.pathsep}{found.get('PYTHONPATH', '')}"
    found |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found.pop("TRITON_INTERPRET", None)
    if dry:
        found["OMP_NUM_THREADS"] = "1"
        if part.kernels:
            found["TRITON_INTERPRET"] = "1"
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """It, and what it has started: Ctrl-C first, so that it may keep what it has."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            continue
        if number == signal.SIGINT:  # what it started may not have heard
            continue
    process.wait(_PATIENCE_S)


def results(parts: Sequence[Part], folder: Path) -> dict[str, Any]:
    """All that is known: of each part how it ended, and what it has found."""
    found: dict[str, Any] = {}
    for part in parts:
        how = ended(folder, part.name)
        if how is not None:
            found[part.name] = {"title": part.title, **how._asdict(), "found": read(folder / f"{part.name}.jsonl")}
    return found
