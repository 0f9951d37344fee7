"""``autotune show``: a profile as a table."""

from __future__ import annotations

from pathlib import Path

import typer

HELP = "Check a profile and print its table. PROFILE is a YAML file, or the name of a shipped profile."
EXAMPLES = "Examples:  autotune show tiny-cpu.yaml  ·  autotune show tiny-cpu.yaml --json | jq .knobs"


def show(
    profile: str = typer.Argument(..., metavar="PROFILE", help="A file, or a name from `autotune profiles`."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object only."),
) -> int:
    """Print a profile's table; 2 when it is not a valid profile."""
    from autotune.cli.display import make_console
    from autotune.profile import load_profile, shipped_profiles
    from autotune.profiling import table
    from autotune.profiling.fingerprint import describe

    path = Path(profile)
    shipped = shipped_profiles()
    if not path.exists() and profile in shipped:
        path = shipped[profile]
    loaded = load_profile(path)
    if as_json:
        print(loaded.model_dump_json())
        return 0
    console = make_console()
    model, load = loaded.model, loaded.workload
    console.print(
        f"{describe(loaded.machine)} · {loaded.machine.cpu} · {loaded.created} · autotune {loaded.software.autotune}\n"
        f"model {model.name} ({model.parameters / 1e6:.0f}M, {model.dtype}) · "
        f"workload {load.spec}, lengths × {load.length_scale:g} · SLO {loaded.slo}",
        highlight=False,
        markup=False,
    )
    table.show(loaded, console)
    return 0
