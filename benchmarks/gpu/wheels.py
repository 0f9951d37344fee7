"""Fetches the packages of ``benchmarks/gpu/wheels.txt`` as wheels, for a machine that has a GPU and no network.

  python -m benchmarks.gpu.wheels --to wheels --python 3.12
  ... carry the folder over, and there:
  python3 -m pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=site

Pure-Python wheels serve any machine. Those that are compiled are fetched for one Python version on x86-64 Linux; --pure leaves
them out, for machines that have them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.command import command, exit_code, say
from runtime.errors import InputError

LIST: Final = Path(__file__).with_name("wheels.txt")
_PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_LINE: Final = re.compile(r"(?P<name>[a-z0-9][a-z0-9.-]*)==(?P<version>[0-9][0-9a-z.]*)(?P<compiled> compiled)?")


class Wheel(NamedTuple):
    name: str
    version: str
    compiled: bool


def wheels(text: str) -> list[Wheel]:
    """Those of a list; raises :class:`InputError` for a line that is none, and a name that comes twice."""
    found: dict[str, Wheel] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or match["name"] in found:
            raise InputError(
                f"{LIST.name}, line {number}: {line!r}; it must be NAME==VERSION, each name once, such as anyio==4.16.0"
            )
        found[match["name"]] = Wheel(match["name"], match["version"], match["compiled"] is not None)
    return list(found.values())


def fetching(wheel: Wheel, folder: Path, python: str) -> list[str]:
    """The command that puts ``wheel`` into ``folder``."""
    platforms = _PLATFORMS if wheel.compiled else ("any",)
    options = [word for platform in platforms for word in ("--platform", platform)]
    return [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:",
        "--python-version", python, "--implementation", "cp" if wheel.compiled else "py", *options, "--dest", str(folder),
        f"{wheel.name}=={wheel.version}",
    ]  # fmt: skip


@exit_code()
def main(argv: Sequence[str] | None = None) -> int:
    parser = command("gpu.wheels", __doc__)
    parser.add_argument("--to", type=Path, default=Path("wheels"), help="the folder (default: wheels)")
    parser.add_argument("--python", type=_python, default="3.12", help="the version there, such as 3.12 (the default)")
    parser.add_argument("--pure", action="store_true", help="without those that are compiled")
    args = parser.parse_args(argv)
    args.to.mkdir(parents=True, exist_ok=True)
    failed = []
    for wheel in wheels(LIST.read_text(encoding="utf-8")):
        if wheel.compiled and args.pure:
            continue
        done = subprocess.run(fetching(wheel, args.to, args.python), capture_output=True, text=True)
        if done.returncode:
            failed.append(wheel.name)
            said = done.stderr.strip().splitlines()
            say(f"{wheel.name}: {said[-1] if said else 'pip failed and said nothing'}")
    files = sorted(args.to.glob("*.whl"))
    print(f"{len(files)} wheels, {sum(file.stat().st_size for file in files) / 2**20:.0f} MiB, in {args.to}")
    return 1 if failed else 0


def _python(text: str) -> str:
    if re.fullmatch(r"3\.1[1-9]", text) is None:
        raise argparse.ArgumentTypeError(f"{text}; it must be a version of Python from 3.11 on, such as 3.12")
    return text


if __name__ == "__main__":
    sys.exit(main())
