"""Ray Serve's ``@serve.batch``: the options of a deployment, as YAML.

They stand under a deployment's name in a Serve config, or go to ``Deployment.options(**…)``. ``user_config`` reaches
``reconfigure`` of the deployment, which hands it to ``set_max_batch_size`` and ``set_batch_wait_timeout_s`` of the batched
method; docs/how-to/export.md has one.
"""

from __future__ import annotations

from autotune.export.files import yaml_file
from autotune.export.rows import FACTS_OF_THE_MODEL, as_calls, batches_calls, no_cost, no_wait
from autotune.export.source import ProfiledCallable, Source
from autotune.export.target import ExportTarget, Fit, Row, Written

_CALLS = 2  # one batch that runs and one that forms: Serve sends a replica no more requests than max_ongoing_requests
_MS = 1000.0


def _batch(source: Source) -> Written:
    size = source.knobs.max_batch_size
    return {"max_ongoing_requests": _CALLS * size, "user_config.max_batch_size": size}


def _wait(source: Source) -> Written:
    return {"user_config.batch_wait_timeout_s": source.knobs.max_wait_ms / _MS}


def _replicas(source: ProfiledCallable) -> Written:
    return {"num_replicas": source.profile.replicas}


_BATCH = ("max_ongoing_requests", "user_config.max_batch_size")
_WAIT: Row[Source] = Row(
    Fit.APPROXIMATE,
    ("user_config.batch_wait_timeout_s",),
    _wait,
    said="Ray Serve closes a batch when its wait is over, even if an earlier one still runs",
    harmless=no_wait,
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
        "max_wait_ms": _WAIT,
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
