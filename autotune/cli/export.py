"""``autotune export``: a profile's setting in another system's terms."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Annotated

from typer import Option

from autotune.cli.exits import DONE
from autotune.cli.options import AsJson, ProfileArgument, Purpose
from autotune.writing import writable
from runtime.errors import InputError

HELP = (
    "Write a setting of a profile as a configuration file of vLLM, SGLang, TensorRT-LLM, Triton or Ray Serve. PROFILE is a YAML "
    "file, or the name of a shipped profile."
)
EXAMPLES = (
    "Examples:  autotune export mine.yaml --to vllm --for interactive --allow-lossy  ·  "
    "autotune export embed.yaml --to triton --out config.pbtxt"
)


def export(
    profile: ProfileArgument,
    to: Annotated[
        str,
        Option(
            "--to",
            help="Target: vllm, sglang, tensorrt-llm, triton or ray-serve. The last two also take the profile of a callable.",
        ),
    ],
    purpose: Purpose = "balanced",
    out: Annotated[
        Path | None,
        Option("--out", "-o", help="The file to write.  (default: a name that follows from --to, such as vllm.yaml)"),
    ] = None,
    model: Annotated[
        str | None,
        Option(
            help="The model to serve: a directory or hub id. A preset stands for the published model of its shape.  (default: "
            "the profile's model)"
        ),
    ] = None,
    allow_lossy: Annotated[
        bool,
        Option(
            "--allow-lossy",
            help="Drop knobs that have no counterpart in the target; without this option they are an error.",
        ),
    ] = False,
    diff: Annotated[
        Path | None,
        Option(
            help="An existing configuration: print what the export would change in this file, and write nothing. Implies "
            "--allow-lossy."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write the file and say what was lost on the way; 2 when it cannot be exported."""
    from autotune.cli.display import WIDEST
    from autotune.export import TARGETS
    from autotune.export import export as export_to
    from autotune.profile import find_profile
    from autotune.profile.callable import load_either

    target = TARGETS.get(to)
    if target is None:
        raise InputError(f"--to is {to}; it must be one of {', '.join(TARGETS)}")
    path = find_profile(profile)
    lossy = allow_lossy or diff is not None
    made = export_to(load_either(path), target, profile_name=path.name, purpose=purpose, model=model, allow_lossy=lossy)
    if model is not None and model.startswith(("/", "./", "../")) and not os.path.exists(model):
        print(f"note: --model is {model}; no such directory here", file=sys.stderr)
    if diff is not None:
        if out is not None:
            raise InputError(f"--out is {out}; with --diff nothing is written")
        changes = made.changes_to(diff)
        if as_json:
            print(json.dumps({"file": str(diff), "changes": changes, "reports": made.reports}))
            return DONE
        for line in made.reports:
            print(textwrap.fill(line, WIDEST, subsequent_indent="  ", break_on_hyphens=False))
        for key, (old, new) in changes.items():
            print(
                f"{key}: {'not set' if old is None else json.dumps(old)} → {'removed' if new is None else json.dumps(new)}"
            )
        if not changes:
            print(f"{diff} has all of these settings already")
        return DONE
    file = out or Path(target.filename)
    if file.suffix in target.suffixes:  # or saving says which it must have
        writable("--out", file)
    made.save(file)
    if as_json:
        print(json.dumps(made.as_dict(file)))
        return DONE
    for line in made.reports:
        print(textwrap.fill(line, WIDEST, subsequent_indent="  ", break_on_hyphens=False))
    print(f"wrote {file}    start it with:  {made.command(file)}")
    return DONE
