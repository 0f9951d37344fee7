"""``autotune show``: a profile as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.cli.options import AsJson, Price, ProfileArgument
from runtime.errors import InputError

if TYPE_CHECKING:
    from autotune.profile import Profile

HELP = "Check a profile and print its table. PROFILE is a YAML file, or the name of a shipped profile."
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
            f"step times known to {cost.error:.1%} (cross-validated; {regions}), from {cost.points} kinds of steps in "
            f"{cost.seconds:.0f} s"
        )
        if (jitter := cost.jitter) is not None:
            low, high = jitter.four_in_five()
            lines.append(
                f"served, a step takes {cost.serving_overhead_s * 1e3:.2g} ms more; four in five are within {low:.2f} to "
                f"{high:.2f} of that"
            )
    if (simulation := profile.simulation) is not None:
        error = simulation.goodput_error
        off = "" if error is None else f"; its goodput was off by {_off(error)} (median, at the rate compared)"
        lines.append(f"{simulation.trials} settings simulated in {simulation.cpu_seconds:.0f} s of CPU{off}")
    return lines


def _off(error: float) -> str:
    return "less than 0.1%" if error < 0.0005 else f"{error:.1%}"
