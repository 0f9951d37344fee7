"""Progress for people: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from autotune.profiling.setup import Setup
from autotune.workload.options import fraction

WIDEST = 120  # columns of a line of prose
_EVERY_S = 10.0  # between plain lines of one stage


def duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02d} min"


def make_console(*, stderr: bool = False) -> Console:
    """Rich takes a pipe for 80 columns wide; a file can be wider, and tables in it must not be cut."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=max(120, console.width))


def say(console: Console, text: str, style: str | None = None) -> None:
    """Prose, folded between words at :data:`WIDEST` columns or where the terminal ends."""
    console.print(text, style=style, markup=False, highlight=False, width=min(WIDEST, console.width))


def print_as_is(console: Console, text: str, style: str | None = None) -> None:
    """Lines that are not folded, for what is copied or parsed; nothing in them is markup."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


class Display:
    """A :class:`autotune.profiling.reporting.Reporter` on a console."""

    def __init__(self, console: Console, head: str = "") -> None:
        self._console = console
        self._head = head
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._since = self._said = 0.0
        if console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description:<12}"),
                BarColumn(bar_width=16, complete_style="cyan", finished_style="green"),
                TextColumn("{task.fields[count]:>10}  {task.fields[elapsed]:>8}  {task.fields[note]}"),
                console=console,
                refresh_per_second=4,
            )

    def note(self, text: str) -> None:
        print_as_is(self._console, text, "dim")

    def ready(self, setup: Setup) -> None:
        targets = ", ".join(f"{n} {v:g} ms" for n, v in setup.slo.targets_ms.items() if v is not None)
        why = "" if setup.slo_from == "given" else f" ({setup.slo_from})"
        basis = (
            "as requested"
            if setup.rate_from == "user"
            else "about what the best setting can just serve, so that settings differ"
        )
        scale = "" if setup.length_scale == 1 else f", lengths × {fraction(setup.length_scale)}"
        if setup.objective == "mean-e2e":
            why = f"{why}; attainment by it is only shown: the objective is the lowest mean E2E"
        classes = "".join(f"class {one}\n" for one in setup.classes)
        print_as_is(
            self._console,
            f"{self._head}{scale}: prompts {setup.mean_prompt:.0f}, outputs {setup.mean_output:.0f} tokens on average\n"
            f"SLO {targets} for {setup.slo.attainment * 100:g}% of requests{why}\n{classes}"
            f"rate {setup.rate:.3g} req/s ({basis}); {setup.window_s:g} s windows",
        )

    def stage(self, name: str) -> None:
        self._stage, self._since, self._said = name, time.monotonic(), time.monotonic()
        if self._bars is not None:
            self._bars.start()
            self._task = self._bars.add_task(name, total=1.0, count="", note="", elapsed="0 s")

    def progress(self, share: float, count: str, note: str, left_s: float | None) -> None:
        text = note + ("" if left_s is None else f"   ~{duration(left_s)} left")
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=share, count=count, note=text, elapsed=self._elapsed())
        elif time.monotonic() - self._said >= _EVERY_S:
            self._said = time.monotonic()
            self._line(count, text)

    def stage_done(self, count: str, note: str) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=1.0, count=count, note=note, elapsed=self._elapsed())
            self._bars.stop()
            self._bars = self._fresh()
            self._task = None
        else:
            self._line(count, note)

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _fresh(self) -> Progress:
        assert self._bars is not None
        return Progress(*self._bars.columns, console=self._console, refresh_per_second=4)

    def _elapsed(self) -> str:
        return duration(time.monotonic() - self._since)

    def _line(self, count: str, note: str) -> None:
        parts = (f"{self._stage:<12}", f"{count:>10}", f"{self._elapsed():>8}", note)
        print_as_is(self._console, "  ".join(parts).rstrip())
