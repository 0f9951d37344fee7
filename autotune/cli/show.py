"""``autotune show``: a profile as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.cli.options import AsJson, Price, ProfileArgument
from runtime.errors import InputError

if TYPE_CHECKING:
    from autotune.profile import Profile

HELP = "Validate a profile, and print it as a table. PROFILE is a YAML file, or the name of a shipped profile."
EXAMPLES = "Examples:  autotune show cpu-2core-tiny --price 2.50/h  ·  autotune show cpu-2core-tiny --json | jq .knobs"


def show(
    profile: ProfileArgument,
    price: Price = None,
    as_json: AsJson = False,
) -> int:
    """Print a profile's table; 2 when it is not a valid profile."""
    from autotune.cli.display import make_console
    from autotune.cost.price import parse_price
    from autotune.profile import find_profile
    from autotune.profile.callable import CallableProfile, load_either
    from autotune.profile.fingerprint import describe
    from autotune.report import profile_table as table
    from autotune.report.callable_table import show as show_callable

    money = None if price is None else parse_price(price)
    loaded = load_either(find_profile(profile))
    if money is not None:
        if isinstance(loaded, CallableProfile):
            raise InputError(
                f"--price is {price}; {profile} is of a function, and makes no tokens that could have a price"
            )
        loaded = loaded.model_copy(update={"price_per_hour": money})
    if as_json:
        print(loaded.model_dump_json())
        return 0
    console = make_console()
    if isinstance(loaded, CallableProfile):
        console.print(
            f"{describe(loaded.machine)} · {loaded.created} · autotune {loaded.software.autotune}", highlight=False
        )
        show_callable(loaded, console)
        return 0
    model, load = loaded.model, loaded.workload
    for line in (
        f"{describe(loaded.machine)} · {loaded.machine.cpu} · {loaded.created} · autotune {loaded.software.autotune}",
        f"model {model.name} ({model.parameters / 1e6:.0f}M, {model.dtypes}) · "
        f"workload {load.spec}, lengths × {load.length_scale:g} · SLO {loaded.slo}",
        *(f"class {one}" for one in loaded.classes),
        *model_lines(loaded),
    ):
        console.print(line, highlight=False, markup=False)
    table.show(loaded, console)
    return 0


def model_lines(profile: Profile) -> list[str]:
    """What the cost model is and how far off it is; then the simulation, held against what was measured."""
    lines = []
    if (cost := profile.cost_model) is not None:
        regions = ", ".join(f"{r.region} {r.median:.1%}" for r in cost.regions)
        lines.append(
            f"error of predicted step times {cost.error:.1%} (cross-validated median; {regions}), from {cost.points} kinds of "
            f"steps measured in {cost.seconds:.0f} s"
        )
        if (jitter := cost.jitter) is not None:
            low, high = jitter.four_in_five()
            lines.append(
                f"serving adds {cost.serving_overhead_s * 1e3:.2g} ms to the predicted time of a step; 80% of steps (weighted by "
                f"time) take {low:.2f} to {high:.2f} times the sum"
            )
    if (simulation := profile.simulation) is not None:
        error = simulation.goodput_error
        off = (
            ""
            if error is None
            else f"; simulated goodput was off by {_off(error)} from measured (median, at the rate compared)"
        )
        lines.append(f"{simulation.trials} settings simulated in {simulation.cpu_seconds:.0f} s of CPU time{off}")
    return lines


def _off(error: float) -> str:
    return "less than 0.1%" if error < 0.0005 else f"{error:.1%}"
