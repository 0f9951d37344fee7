"""What ``autotune profile`` writes: its files, checked before anything is measured; in the end the table, and how it went."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli.display import print_as_is
from autotune.cli.exits import DONE, FELL_SHORT, INTERRUPTED
from autotune.export import TARGETS, export
from autotune.profile import EngineFacts, KvPool, Profile, profile_text
from autotune.profile.callable import CallableProfile, load_either
from autotune.profile.fingerprint import software
from autotune.profile.text import is_profile, is_sidecar
from autotune.profiling.assemble import assemble, of_engine, sidecar
from autotune.profiling.findings import Findings
from autotune.report.profile_table import show
from autotune.writing import replaceable, writable, write_together
from runtime.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.cli.profile_study import Requested
    from autotune.engines import Engine

NEXT = (
    ("report", "{}", "pictures, one HTML file"),
    ("export", "{} --to vllm", "take the settings along"),
    ("check", "{}", "is it still true?"),
)
"""What to do with a profile: verb, its arguments, what it does."""


def next_steps(made: Profile, file: Path) -> list[tuple[str, str]]:
    """(command, what it does) as they work for this very profile: vLLM may have nothing for one of its knobs."""
    found = []
    for verb, arguments, what in NEXT:
        command = f"autotune {verb} {arguments.format(shlex.quote(str(file)))}"
        if verb == "export":
            try:
                export(made, TARGETS["vllm"])
            except InputError:
                command += " --allow-lossy"
        found.append((command, what))
    return found


def longer(budget_s: float) -> str:
    """What to do for narrower intervals: three times the budget spent is some 1/√3 of their width."""
    return f"For narrower intervals, run the same command with --fresh --budget {math.ceil(3 * budget_s / 60)}m."


def activation() -> str | None:
    """What makes the shell find ``autotune``, where it does not and the virtual environment that this runs in has it."""
    scripts = Path(sys.prefix) / "bin"
    if shutil.which("autotune") is not None or not all((scripts / name).is_file() for name in ("activate", "autotune")):
        return None
    here = Path.cwd()
    near = scripts.relative_to(here) if scripts.is_relative_to(here) else scripts
    return shlex.join(["source", str(near / "activate")])


@dataclass(frozen=True)
class Files:
    """The profile, its raw runs, and the study behind them."""

    profile: Path
    points: Path
    journal: Path

    @classmethod
    def of(cls, out: Path, study: Path | None) -> Files:
        """Paths from ``--out`` and ``--study``. Raises :class:`InputError` when one of them cannot be written, or
        when what is there is somebody else's."""
        try:
            str(out).encode()
        except UnicodeEncodeError:  # its stem becomes the profile's name, which is text
            raise InputError(f"--out: {str(out)!r} is not UTF-8; a profile's name is text") from None
        if out.suffix not in (".yaml", ".yml"):
            raise InputError(f"--out: {out} must end in .yaml")
        files = cls(out, out.with_suffix(".points.jsonl"), study or out.with_suffix(".journal"))
        if files.journal.resolve() in (files.profile.resolve(), files.points.resolve()):
            raise InputError(f"--study: {study} is what --out writes; name another file")
        for option, path in (("--out", files.profile), ("--out", files.points), ("--study", files.journal)):
            writable(option, path)
        replaceable("--out", files.profile, is_profile, "is no profile")
        replaceable("--out", files.points, is_sidecar, "holds no runs of a profile")
        return files


def unmeasured_beside(file: Path, made: Profile | CallableProfile) -> bool:
    """Whether ``file`` is a profile of what was measured, and ``made`` of what was simulated alone."""
    if made.measured:
        return False
    try:
        return load_either(file).measured
    except InputError:  # none is there, or none that can be read
        return False


def left_alone(file: Path, fault: str = "") -> str:
    """What is said where :func:`unmeasured_beside` is so, of a run that was stopped; ``fault``: by what, if not by the user."""
    why = f"stopped, for {fault}," if fault else "stopped"
    return f"{why} before a setting was measured; {file} stays as it was. Run the same command to go on."


def engine_facts(engine: Engine, arguments: Mapping[str, str]) -> EngineFacts:
    """``engine`` as a profile has it; ``arguments``: what else it was started with."""
    facts = engine.facts
    return EngineFacts(
        name=facts.engine,
        version=facts.version,
        kv_pool=KvPool(block_size=facts.block_size, blocks=facts.kv_tokens // facts.block_size),
        limits=engine.limits,
        prefix_cache=facts.prefix_cache,
        parallelism=facts.parallelism,
        growth_reserve=facts.growth_reserve,
        kv_allocation=facts.kv_allocation,
        kv_blocks=engine.view().kv_total_blocks or None,
        kv_block_size=facts.kv_block_size,
        kv_bytes=facts.kv_bytes,
        options=dict(arguments),
    )


def finish(
    found: Findings,
    requested: Requested,
    engine: Engine,
    files: Files,
    console: Console,
    command: str,
    as_json: bool,
) -> int:
    """Write the profile and its sidecar, show the table, and say how it went."""
    question = requested.question
    parts = of_engine(
        found,
        question,
        spec=requested.spec,
        engine=engine_facts(engine, requested.source.arguments),
        model=requested.model,
        baseline=question.space.baseline,
        points_file=files.points,
        price_per_hour=requested.price,
    )
    made = assemble(
        Profile, found, parts, name=files.profile.stem, command=command, machine=requested.machine, software=software()
    )
    if found.stopped and unmeasured_beside(files.profile, made):
        if as_json:
            print(json.dumps({"file": str(files.profile), "status": made.status}))
        print_as_is(console, left_alone(files.profile, found.fault))
        return FELL_SHORT if found.fault else INTERRUPTED
    write_together({files.points: sidecar(found), files.profile: profile_text(made, files.profile)})
    if as_json:
        shape = {
            "file": str(files.profile),
            "status": made.status,
            "slo_met": made.slo_met,
            "profile": made.model_dump(mode="json"),
        }
        print(json.dumps(shape))
    show(made, console)
    if found.stopped:
        done, planned = found.validated
        count = f"{done} of {planned} validated" if done else f"{len(found.simulated)} simulated, none validated"
        why = f"stopped, for {found.fault}" if found.fault else "stopped"
        again = f"{why}; best so far written to {files.profile} ({count}). Run the same command to go on."
        print_as_is(console, again)
        return FELL_SHORT if found.fault else INTERRUPTED
    print_as_is(console, f"\nprofile  {files.profile}")
    for index, (step, what) in enumerate(next_steps(made, files.profile)):
        start = "" if index else "next"
        print_as_is(console, f"{start:<7}  {step:<44}  # {what}")
    notes = [] if question.budget_s is None else [longer(question.budget_s)]
    if (activate := activation()) is not None:
        notes.append(f"`autotune` is not on your PATH: {activate}")
    for note in notes:
        print_as_is(console, f"{'':<7}  {note}")
    return DONE if made.slo_met else FELL_SHORT
