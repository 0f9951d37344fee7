"""Ray Serve's ``@serve.batch``: the options of a deployment, as YAML.

They stand under a deployment's name in a Serve config, or go to ``Deployment.options(**…)``. ``user_config`` reaches
``reconfigure`` of the deployment, which hands it to ``set_max_batch_size`` and ``set_batch_wait_timeout_s`` of the batched
method; docs/how-to/export.md has one.
"""

from __future__ import annotations

import math

from autotune.export.files import yaml_file
from autotune.export.rows import FACTS_OF_THE_MODEL, as_calls, batches_calls, no_cost
from autotune.export.source import ProfiledCallable, Source
from autotune.export.target import ExportTarget, Fit, Row, Written

_CALLS = 2  # one batch that runs and one that forms: Serve sends a replica no more requests than max_ongoing_requests
_MS = 1000.0


def _batch(source: Source) -> Written:
    size = source.knobs.max_batch_size
    return {"max_ongoing_requests": _CALLS * size, "user_config.max_batch_size": size}


def _wait(source: Source) -> Written:
    return {"user_config.batch_wait_timeout_s": source.knobs.max_wait_ms / _MS}


def _call_ms(source: ProfiledCallable) -> float:
    """Of a full call as it is made here, or of one that is large enough to serve the most within the SLO."""
    service, cost, knobs = source.profile.service, source.profile.inputs.mean_cost, source.knobs
    items = max(1, min(knobs.max_batch_size, service.capacity_size, int(knobs.token_budget // cost)))
    ms = service.beside * (service.fixed_ms + items * (service.per_item_ms + cost * service.per_cost_ms))
    return float(f"{ms:.3g}")


def _gathers(source: ProfiledCallable) -> bool:
    """Whether items gather here behind a call that takes longer than their wait."""
    return not _alone(source) and _call_ms(source) > source.knobs.max_wait_ms


def _slo_ms(source: ProfiledCallable) -> float:
    return math.inf if source.profile.slo.e2e_ms is None else source.profile.slo.e2e_ms


def _no_room(source: ProfiledCallable) -> bool:
    """Whether an item that waits as long as a call runs is late before its own has ended."""
    return 2 * _call_ms(source) > _slo_ms(source)


def _wait_ms(source: ProfiledCallable) -> float:
    """A batch is closed when the one before it ends: with shorter waits, those that are closed pile up. Where the SLO has no room
    for that, half of what it has beside a call: the other half is for what more items take, and for Ray Serve itself."""
    waits, call = source.knobs.max_wait_ms, _call_ms(source)
    if not _gathers(source):
        return waits
    return max(waits, float(f"{(_slo_ms(source) - call) / 2:.3g}")) if _no_room(source) else call


def _wait_for_call(source: ProfiledCallable) -> Written:
    return {"user_config.batch_wait_timeout_s": _wait_ms(source) / _MS}


def _longer(source: ProfiledCallable) -> str:
    if not _gathers(source):
        return ""
    if _no_room(source):
        return (
            f"{_CLOSES}. Here items gather while a call runs, which takes {_call_ms(source):g} ms: an item that waits as long "
            f"there is late for the SLO of {_slo_ms(source):g} ms, so {_wait_ms(source):g} ms is written, and batches stay small"
        )
    return (
        f"{_CLOSES}. Here items gather while a call runs, so {_call_ms(source):g} ms is written, the time of a full call: with a "
        "shorter wait batches would pile up. An item that comes alone waits as long"
    )


def _alone(source: Source) -> str:
    return "calls of one item wait for no other" if source.knobs.max_batch_size == 1 else ""


def _replicas(source: ProfiledCallable) -> Written:
    return {"num_replicas": source.profile.replicas}


_BATCH = ("max_ongoing_requests", "user_config.max_batch_size")
_CLOSES = "Ray Serve closes a batch when its wait is over, even if an earlier one still runs"
_KEYS = ("user_config.batch_wait_timeout_s",)
_WAIT: Row[Source] = Row(
    Fit.APPROXIMATE,
    _KEYS,
    _wait,
    said=f"{_CLOSES}: under load a wait below the time of a call makes batches smaller, and one of 0 makes them of one request. "
    "Set it to about the time of a full call",
    harmless=_alone,
)

RAY_SERVE = ExportTarget(
    name="ray-serve",
    title="Ray Serve",
    version="2.60",
    filename="ray-serve.yaml",
    suffixes=(".yaml", ".yml"),
    knobs=as_calls(Row(Fit.APPROXIMATE, _BATCH, _batch, said=batches_calls("Ray Serve")), _WAIT, "Ray Serve"),
    facts=FACTS_OF_THE_MODEL,
    calls={
        "replicas": Row(Fit.EXACT, ("num_replicas",), _replicas),
        "max_batch_size": Row(Fit.EXACT, _BATCH, _batch),
        "max_wait_ms": Row(Fit.APPROXIMATE, _KEYS, _wait_for_call, said=_CLOSES, harmless=_alone, differs=_longer),
        "token_budget": Row(
            Fit.UNSUPPORTED,
            said="Ray Serve's batch_size_fn counts costs in the place of items, not beside them",
            harmless=no_cost,
        ),
    },
    constraints=(),
    render=yaml_file,
    command=lambda model, path: f"serve.run(Deployment.options(**yaml.safe_load(open({path!r}))).bind())",
)
