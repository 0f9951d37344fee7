"""Write every setting of a profile as a file for `vllm serve --config`, and say what each one loses on the way.

    autotune profile --out mine.yaml
    python examples/export_to_vllm.py mine.yaml [--model DIRECTORY_OR_HUB_ID] [--folder vllm]

`autotune export` does the same for one setting; this is how to do it from a program.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from autotune import load_profile
from autotune.export import TARGETS, Fit, export
from runtime import InputError


def export_all(file: Path, model: str | None, folder: Path) -> None:
    profile = load_profile(file)
    for purpose in profile.settings:
        made = export(profile, TARGETS["vllm"], profile_name=file.name, purpose=purpose, model=model, allow_lossy=True)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{purpose}.yaml"
        made.save(path)
        exact = sum(entry.fit is Fit.EXACT for entry in made.entries)
        print(f"{purpose}: {exact} of {len(made.entries)} settings carry over exactly")
        for line in made.reports:
            print(f"  {line}")
        print(f"  {made.command(path)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--model", help="what vLLM is to serve; needed when the profile is of `tiny`")
    parser.add_argument("--folder", type=Path, default=Path("vllm"))
    args = parser.parse_args()
    try:
        export_all(args.profile, args.model, args.folder)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
