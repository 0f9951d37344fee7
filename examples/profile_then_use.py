"""Start an engine with the settings a profile recommends, and see whether it meets the SLO they were measured under.

    autotune profile --out mine.yaml
    python examples/profile_then_use.py mine.yaml [--for interactive]

Without a file, the first profile that comes with the package is taken.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from autotune import load_profile, shipped_profiles
from runtime import Engine, InputError, ModelError
from runtime.slo import attainment


def choose(path: Path | None) -> Path:
    """``path``, or a profile that comes with the package."""
    if path is not None:
        return path
    shipped = shipped_profiles()
    if not shipped:
        raise InputError("no profile comes with this package; make one with `autotune profile --out mine.yaml`")
    return next(iter(shipped.values()))


def serve(path: Path, purpose: str, requests: int, tokens: int) -> None:
    profile = load_profile(path)
    if purpose not in profile.settings:
        raise InputError(f"--for is {purpose}; {path} holds {', '.join(profile.settings)}")
    setting = profile.settings[purpose]
    print(f"{path.name}: measured on {profile.machine.cpu}, SLO {profile.slo}")
    print(f"{purpose}: {setting.knobs} ({setting.why})")

    with Engine(
        profile.model.name,
        knobs=setting.knobs,
        limits=profile.engine.limits,
        slo=profile.slo,
        dtype=profile.model.dtype,
        kv_tokens=profile.engine.kv_pool.tokens,
        block_size=profile.engine.kv_pool.block_size,
        prefix_cache=profile.engine.prefix_cache,
        threads=profile.machine.threads,
    ) as engine:
        done = engine.generate([f"Question {i}: why?" for i in range(requests)], max_tokens=tokens)

    found = attainment((completion.record for completion in done), profile.slo)
    print(
        f"{found.met} of {found.offered} requests in time "
        f"({found.share:.0%}; with 95% confidence {found.low:.0%}–{found.high:.0%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", type=Path)
    parser.add_argument("--for", dest="purpose", default="balanced")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24, help="output tokens of each request")
    args = parser.parse_args()
    try:
        serve(choose(args.profile), args.purpose, args.requests, args.tokens)
    except (InputError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
