"""Run every check and benchmark that needs a GPU, by one command.

Each part runs in a process of its own with a time limit; one that fails, hangs or loses the device stops no other, and what it
had found until then is kept. Needs torch, Triton, transformers, NumPy and psutil; the parts that serve or profile also need the
packages of ``benchmarks/gpu/wheels.txt`` (``python -m benchmarks.gpu.wheels`` fetches them where there is a network), and say so
where they are missing. The results are one JSON file and one page, ``results.json`` and ``results.md`` in the folder ``--out``,
which also holds the profiles and a log of each part.

Examples:
  python -m benchmarks.gpu                          all parts, about an hour and a half
  python -m benchmarks.gpu --minutes 9.5            only parts that are certain to end within 9.5 minutes ...
  python -m benchmarks.gpu --minutes 9.5 --resume   ... and from there on, as often as it takes
  python -m benchmarks.gpu --part kernels --part anatomy
  python -m benchmarks.gpu --dry                    all of it on a CPU with tiny shapes, to see that it runs

Ctrl-C ends the part that runs, writes the results and exits with 130. The exit code is 1 if a part failed, and 75 if some were
not begun.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import INTERRUPTED, command, exit_code, say
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.place import ended, write
from runtime.errors import InputError

FAILED, NOT_BEGUN = 1, 75


@exit_code()
def main(argv: Sequence[str] | None = None) -> int:
    parser = command("gpu", __doc__)
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--part", action="append", help=f"one of the parts, several times for several: {', '.join(names)}"
    )
    parser.add_argument("--resume", action="store_true", help="leave out what is done already in --out, by this code")
    parser.add_argument(
        "--minutes", type=_minutes, default=math.inf, help="begin no part that may not end within so many"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results"), help="the folder of the results (default: gpu-results)"
    )
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--list", action="store_true", help="say which parts there are, and end")
    args = parser.parse_args(argv)
    if args.list:
        for part in PARTS:
            print(f"{part.name:22} {part.limit_s:4.0f} s at most  {part.title}")
        return 0
    for name in args.part or ():
        if name not in names:
            raise InputError(f"--part is {name}; it must be one of {', '.join(names)}")
    folder: Path = args.out.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out is {args.out}: {error.strerror}") from None
    from benchmarks.gpu.page import page
    from benchmarks.gpu.running import FINAL, results, run_parts
    from benchmarks.kept import code_digest

    chosen = [part for part in PARTS if not args.part or part.name in args.part]
    if args.resume:
        known, code = {part: ended(folder, part.name) for part in chosen}, code_digest()
        chosen = [
            p
            for p in chosen
            if (how := known[p]) is None or how.state not in FINAL or how.dry != args.dry or how.code != code
        ]
        if others := [part.name for part, how in known.items() if how is not None and how.code != code]:
            say(f"of other code, and not counted as done: {', '.join(others)}")
        say(f"{len(known) - len(chosen)} parts are done, {len(chosen)} are left")
    interrupted, left = run_parts(chosen, folder, dry=args.dry, minutes=args.minutes, say=say)
    found = results(PARTS, folder)
    write(folder / "results.json", json.dumps(found, indent=1) + "\n")
    write(folder / "results.md", page(found))
    states = {name: one["state"] for name, one in found.items()}
    print(f"results  {folder / 'results.md'}")
    print(json.dumps({"states": states, "not_begun": [part.name for part in left]}))
    if interrupted:
        return INTERRUPTED
    if left:
        return NOT_BEGUN
    return FAILED if any(states.get(part.name) not in FINAL for part in chosen) else 0


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 24 * 60:
        raise argparse.ArgumentTypeError(f"{text}; it must be 1 to 1440 minutes")
    return value


if __name__ == "__main__":
    sys.exit(main())
