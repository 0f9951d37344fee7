"""Where the figures come from, and all of them."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.cost.price import money
from autotune.profile import Point, Profile
from autotune.profiling.objective import Objective
from autotune.report.evidence import Evidence, MeasuredTrial
from autotune.report.section import Section, Table
from autotune.report.wording import (
    STAGES,
    counted,
    listed,
    mean_cell,
    mean_title,
    names,
    number,
    percent,
    plus_minus,
    required,
)
from autotune.workload.options import fraction
from runtime.knobs import KNOBS, Knobs
from runtime.slo import share_met

_STAGE_ORDER = {"validation": 0, "search": 1, "capacity": 2, "simulation": 3}


def origins(evidence: Evidence) -> Section:
    profile = evidence.profile
    machine, load, model, engine = profile.machine, profile.workload, profile.model, profile.engine
    gpu = machine.gpu
    threads = f", {counted(machine.threads, 'thread')}" if machine.threads else ""
    weights = f"random weights, seed {model.seed}" if model.random_weights else "its own weights"
    seeds = listed(map(str, load.validation_seeds)) if load.validation_seeds else "none"
    stored = "" if model.kv_cache_dtype == "auto" else f", kept in {model.kv_cache_dtype}"
    rows: list[tuple[str, str]] = [
        ("Command", profile.command),
        ("Made", f"{profile.created}, {profile.status}"),
        (
            "Software",
            f"autotune {profile.software.autotune}, torch {profile.software.torch}, transformers "
            f"{profile.software.transformers}, Python {profile.software.python}",
        ),
        ("Engine", f"{engine.name} {engine.version}; prefix cache {'on' if engine.prefix_cache else 'off'}"),
        ("KV pool", f"{engine.kv_pool.tokens:,} tokens in blocks of {engine.kv_pool.block_size}{stored}"),
        ("Ceilings", ", ".join(f"{s.name} {getattr(engine.limits, s.name):,g}" for s in KNOBS)),
        ("GPU", f"{gpu.count} × {gpu.name}, {gpu.memory_gib:.0f} GiB, CUDA {gpu.cuda}" if gpu else "none used"),
        ("CPU", f"{machine.cpu}, {counted(machine.cores, 'core')}{threads}, {machine.memory_gib:.0f} GiB"),
        ("System", machine.os),
        (
            "Model",
            f"{model.name} ({model.architecture}), {model.size} parameters, {model.dtype}, {weights}",
        ),
        (
            "Workload",
            f"{load.spec}: {load.description}; lengths × {fraction(load.length_scale)}, prompts {load.mean_prompt:.0f} "
            f"and outputs {load.mean_output:.0f} tokens on average",
        ),
        (
            "Rate",
            f"{number(load.rate)} req/s ({'as requested' if load.rate_from == 'user' else 'from the calibration'})",
        ),
        ("Windows", f"{load.window_s:g} s after {load.warmup_s:g} s of warm-up"),
        ("SLO", f"{profile.slo} ({profile.slo_from})"),
        ("Seeds", f"search {load.search_seed}, validation {seeds}"),
    ]
    if profile.simulation is not None:
        facts = profile.simulation
        rows.append(("Simulated", f"{facts.trials} trials in {facts.cpu_seconds:.0f} s of CPU"))
    if profile.price_per_hour is not None:
        rows.append(("Price", f"{money(profile.price_per_hour)} an hour"))
    rows.append(("Files", f"{evidence.source}, {profile.points_file}"))
    table = Table(("", ""), rows)
    return Section("provenance", "Provenance", "Where these figures come from", tables=(table,), notes=evidence.lacking)


def everything(evidence: Evidence) -> Section:
    """All points: measured ones in the open, simulated ones folded."""
    profile = evidence.profile
    called = names(evidence)
    chosen = evidence.recommended.knobs
    objective = Objective.of(profile)
    measured = sorted(profile.points, key=lambda p: (_STAGE_ORDER[p.stage], -objective.value(p)))
    columns = _columns(profile)
    tables = [
        Table(
            columns,
            [_row(profile, p, called) for p in measured],
            frozenset(range(2, len(columns))),
            frozenset(n for n, p in enumerate(measured) if p.knobs == chosen),
        )
    ]
    simulated = evidence.trials("simulation")
    if simulated:
        own = [c for c in columns if c != "load (req/s)"]
        tables.append(
            Table(
                own,
                [_trial_row(profile, t, called) for t in sorted(simulated, key=lambda t: -objective.value(t))],
                frozenset(range(2, len(own))),
                frozenset(),
                title=f"{len(simulated)} simulated settings",
                folded=True,
            )
        )
    lead = "Latencies are medians over the runs of a setting. Click a heading to sort."
    return Section("points", "All points", f"{len(measured)} measured settings and rates", lead, tables=tuple(tables))


def _columns(profile: Profile) -> list[str]:
    found = [
        "setting",
        "stage",
        *(spec.name for spec in KNOBS),
        "load (req/s)",
        *mean_title(Objective.of(profile)),
        "attainment",
        "goodput (req/s)",
        "tokens/s",
    ]
    found += ["TTFT p99 (ms)", "TPOT p99 (ms)", "E2E p99 (ms)"]
    return [*found, "price/M tokens"] if profile.price_per_hour is not None else found


def _row(profile: Profile, p: Point, called: dict[Knobs, str]) -> tuple[str, ...]:
    return (
        called.get(p.knobs, p.label),
        STAGES[p.stage],
        *_knobs(p.knobs),
        number(p.offered_rate),
        *mean_cell(Objective.of(profile), p),
        percent(share_met(p), target=required(Objective.of(profile))),
        plus_minus(p),
        number(p.throughput.mean, 4),
        *(number(v) for v in (p.ttft_p99_ms, p.tpot_p99_ms, p.e2e_p99_ms)),
        *_price(profile, p.throughput.mean),
    )


def _trial_row(profile: Profile, t: MeasuredTrial, called: dict[Knobs, str]) -> tuple[str, ...]:
    return (
        called.get(t.knobs, f"trial {t.number}" if t.number >= 0 else t.label),
        STAGES[t.stage],
        *_knobs(t.knobs),
        *mean_cell(Objective.of(profile), t),
        percent(t.attainment, target=required(Objective.of(profile))),
        number(t.goodput),
        number(t.throughput, 4),
        *(number(v) for v in (t.ttft_p99_ms, t.tpot_p99_ms, t.e2e_p99_ms)),
        *_price(profile, t.throughput),
    )


def _knobs(knobs: Knobs) -> Iterable[str]:
    return (f"{getattr(knobs, spec.name):,g}" for spec in KNOBS)


def _price(profile: Profile, tokens_per_s: float) -> tuple[str, ...]:
    if profile.price_per_hour is None:
        return ()
    return (money(Objective.of(profile).cost(tokens_per_s)),)
