"""``autotune profiles``: what ships with the package, and the schema of a profile."""

from __future__ import annotations

import json

import typer

from runtime.errors import InputError

HELP = "List the profiles that come with this package: measured on real hardware, each with its provenance."
EXAMPLES = (
    "Examples:  autotune profiles  ·  autotune profiles --json  ·  autotune profiles --schema > profile.schema.json"
    "  ·  autotune profiles --schema --callable > callable.schema.json"
)


def profiles(
    as_json: bool = typer.Option(False, "--json", help="Print only one JSON object."),
    schema: bool = typer.Option(
        False, "--schema", help="Print the JSON schema of profiles, for editors, instead of the list."
    ),
    of_callable: bool = typer.Option(False, "--callable", help="With --schema: the schema of callables' profiles."),
) -> int:
    """List the shipped profiles; a broken one is an error."""
    from rich.table import Table
    from rich.text import Text

    from autotune.cli.display import make_console
    from autotune.profile import load_profile, shipped_profiles
    from autotune.report.wording import counted

    if of_callable and not schema:
        raise InputError("--callable is given without --schema; none of the profiles that come along is of a callable")
    if as_json and schema:
        raise InputError("--json is given with --schema, which is JSON as it is; leave it out")
    if schema:
        from autotune.profile.callable import callable_schema
        from autotune.profile.schema import schema_text

        print(schema_text(callable_schema() if of_callable else None), end="")
        return 0
    found = {name: (path, load_profile(path)) for name, path in shipped_profiles().items()}
    if as_json:
        listed = {
            name: {
                "path": str(path),
                "machine": p.machine.processor,
                "model": p.model.name,
                "slo": str(p.slo),
                "knobs": p.knobs.as_dict(),
            }
            for name, (path, p) in found.items()
        }
        print(json.dumps(listed))
        return 0
    console = make_console()
    if not found:
        console.print("no profiles are shipped with this version; make one: autotune profile")
        return 0
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, (_, p) in found.items():
        machine = p.machine.gpu.name if p.machine.gpu else f"{p.machine.cpu}, {counted(p.machine.cores, 'core')}"
        table.add_row(name, f"{machine} · {p.model.name} {p.model.dtype} · {p.workload.spec} · SLO {p.slo}")
        table.add_row("", Text(str(p.knobs), style="dim"))
    console.print(table)
    return 0
