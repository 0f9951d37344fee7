"""``autotune serve --engine vllm``: what its options say to ``vllm serve``. The command is made in autotune/engines/vllm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from autotune.engines.named import named
from runtime.errors import InputError

if TYPE_CHECKING:
    from autotune.profile import Profile
    from runtime.knobs import KnobLimits
    from runtime.slo import SLO


def serve_vllm(
    model: str,
    *,
    slo: SLO | None,
    classes: Sequence[str],
    profile: tuple[Path, Profile] | None,
    limits: KnobLimits,
    pinned: Mapping[str, float],
    controller: str | None,
    decisions: Path | None,
    reject_late: bool,
    relegate_late: bool,
    off: bool,
    flags: Mapping[str, str | int | None],
    grace: float,
    more: Sequence[str],
    refused: Mapping[str, bool],
) -> NoReturn:
    """Become ``vllm serve``. ``refused``: options that mean nothing to it, and whether they were given."""
    for option, given in refused.items():
        if given:
            raise InputError(f"{option} does not go with --engine vllm; what vLLM has in its place goes after --")
    if slo is None:
        raise InputError("--engine vllm tunes vLLM to an SLO: add --slo ttft=500ms,tpot=50ms, or a --profile with one")
    from autotune.engines.vllm.command import ServeCommand, run
    from autotune.engines.vllm.serving import Options
    from autotune.profile import find_profile
    from autotune.profile.serving import prefill_rate

    run(
        ServeCommand(
            model,
            Options(
                slo=str(slo),
                profile=None if profile is None else str(find_profile(profile[0]).resolve()),
                classes=tuple(classes),
                controller=controller,
                log=None if decisions is None else str(decisions.resolve()),
                reject_late=reject_late,
                relegate_late=relegate_late,
                off=off,
                pinned=pinned,
            ),
            None if profile is None else limits,
            None if profile is None else prefill_rate(profile[1]),
            {**flags, "--shutdown-timeout": math.ceil(grace)},
            (*_profiled(None if profile is None else profile[1]), *more),
        )
    )


def _profiled(profile: Profile | None) -> list[str]:
    """What vLLM was started with when it was profiled, as options of its command."""
    words: list[str] = []
    if profile is not None and named(profile.engine.name) == "vllm":
        for name, value in profile.engine.options.items():
            option = name.replace("_", "-")
            switch = {"true": [f"--{option}"], "false": [f"--no-{option}"]}.get(value.lower())
            words += switch or [f"--{option}", value]
    return words
