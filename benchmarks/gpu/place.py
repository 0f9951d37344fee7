"""Where a part runs, how large its questions are, and where its answers go."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.kept import code_digest

if TYPE_CHECKING:
    import torch


class LeftOutError(Exception):
    """The part cannot run here, and says why; that is no failure."""


@dataclass(frozen=True)
class Place:
    """``dry``: on the CPU, with tiny shapes, to see that all of it runs. ``folder``: of the results."""

    folder: Path
    file: Path
    dry: bool

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def model(self, name: str) -> str:
        """The preset ``name``, or the smallest there is."""
        return "nano" if self.dry else name

    def dtype(self) -> str:
        return "float32" if self.dry else "bfloat16"

    def keep(self, name: str, found: object) -> None:
        """Write an answer at once: what is kept survives whatever ends the part."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "found": found}) + "\n")
        print(f"> {name}: {_short(found)}", flush=True)

    def earlier(self, part: str, name: str) -> Any:
        """What another part has found; None if it has not run, or not as this one: of the same code, and dry or not."""
        how = ended(self.folder, part)
        if how is None or how.dry != self.dry or how.code != code_digest():
            return None
        return read(self.folder / f"{part}.jsonl").get(name)


class Ended(NamedTuple):
    """How a part ended: ``done``, ``left out``, ``failed``, ``out of time`` or ``interrupted``; ``why`` in a line; ``code``: what
    made it, :func:`benchmarks.kept.code_digest`."""

    state: str
    seconds: float
    why: str = ""
    dry: bool = False
    code: str = ""


def ended(folder: Path, part: str) -> Ended | None:
    """How ``part`` ended the last time, or None."""
    try:
        return Ended(**json.loads(state_file(folder, part).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def state_file(folder: Path, part: str) -> Path:
    """Where it is written how ``part`` ended."""
    return folder / f"{part}.state.json"


def read(file: Path) -> dict[str, Any]:
    """The answers in ``file``, by name; a line that was cut off is left out."""
    found: dict[str, Any] = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                answer = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[answer["name"]] = answer["found"]
    return found


def write(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``, whole or not at all."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _short(found: object) -> str:
    text = json.dumps(found)
    return text if len(text) <= 150 else f"{text[:147]}..."


def seconds_of(device: torch.device, work: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> float:
    """The median of the seconds that ``work`` takes on ``device``, by its events; on a CPU by the clock."""
    import torch

    cuda: Any = torch.cuda  # whose events have no types
    if device.type == "cpu":  # once: a kernel that is interpreted takes seconds
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun
    for _ in range(warm_up):
        work()
    pairs = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    busy = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    for _ in range(
        48
    ):  # some milliseconds, in which all that follows is queued: else small work is timed at the host's speed
        busy.fill_(0)
    for begin, end in pairs:
        begin.record()
        work()
        end.record()
    cuda.synchronize()
    return float(sorted(begin.elapsed_time(end) / 1e3 for begin, end in pairs)[repeats // 2])


def synchronized(device: torch.device) -> None:
    """Wait until ``device`` has done all it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
