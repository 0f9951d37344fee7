"""Runs one part in this process, started by ``python -m benchmarks.gpu``: a GPU that is lost is lost to one process."""

from __future__ import annotations

import argparse
import importlib
import traceback
from pathlib import Path

from benchmarks.command import exit_code
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.place import LeftOutError, Place
from runtime.errors import InputError
from runtime.shared.at_exit import end_process

LEFT_OUT = 3


@exit_code()
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.part", description=__doc__)
    parser.add_argument("name", choices=[part.name for part in PARTS])
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny shapes")
    args = parser.parse_args()
    part = next(part for part in PARTS if part.name == args.name)
    place = Place(args.out, args.out / f"{part.name}.jsonl", args.dry)
    try:
        if not place.dry:
            _need_gpu()
        importlib.import_module(f"benchmarks.gpu.parts.{part.module}").run(place, part.argument)
    except LeftOutError as reason:
        print(f"left out: {reason}", flush=True)
        return LEFT_OUT
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("autotune", "benchmarks", "runtime", ""):
            raise
        print(f"left out: it needs {package}, which is not installed (benchmarks/gpu/wheels.txt)", flush=True)
        return LEFT_OUT
    except InputError:
        raise
    except Exception as error:
        traceback.print_exc()
        print(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:500]}", flush=True)
        return 1
    return 0


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise LeftOutError(f"PyTorch {torch.__version__} sees no CUDA device; --dry runs on a CPU")


if __name__ == "__main__":
    end_process(main())  # whatever it has done to its device
