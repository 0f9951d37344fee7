"""Triton Inference Server's dynamic batcher: a ``config.pbtxt``.

Fields are those of ``model_config.proto``. Without preferred sizes the batcher waits until ``max_batch_size`` requests are there
or the oldest has waited ``max_queue_delay_microseconds``. What is not named here, a server completes for backends that can
describe their models (unless it is started with ``--disable-auto-complete-config``).
"""

from __future__ import annotations

import shlex
from pathlib import PurePath

from autotune.export.files import protobuf_text
from autotune.export.rows import FACTS_OF_THE_MODEL, as_calls, batches_calls, no_cost, no_wait
from autotune.export.source import CallableSource, Source
from autotune.export.target import ExportTarget, Fit, Row, Written

_MICROSECONDS = 1000


def _batch(source: Source) -> Written:
    return {"max_batch_size": source.knobs.max_batch_size}


def _delay(source: Source) -> Written:
    key = "dynamic_batching.max_queue_delay_microseconds"
    return {key: round(source.knobs.max_wait_ms * _MICROSECONDS)}


def _instances(source: CallableSource) -> Written:
    return {"instance_group.count": source.profile.replicas}


def _command(model: str | None, path: str) -> str:
    home = shlex.quote(f"REPOSITORY/{'MODEL' if model is None else PurePath(model).name}")
    return (
        f"mkdir -p {home} && cp {shlex.quote(path)} {home}/config.pbtxt && tritonserver --model-repository REPOSITORY"
    )


_DELAY = ("dynamic_batching.max_queue_delay_microseconds",)

TRITON = ExportTarget(
    name="triton",
    title="Triton's dynamic batcher",
    version="2",
    filename="config.pbtxt",
    suffixes=(".pbtxt",),
    knobs=as_calls(
        Row(Fit.APPROXIMATE, ("max_batch_size",), _batch, said=batches_calls("Triton")),
        Row(Fit.APPROXIMATE, _DELAY, _delay, said="Triton waits for requests, not for their tokens", harmless=no_wait),
        "Triton",
    ),
    facts=FACTS_OF_THE_MODEL,
    calls={
        "replicas": Row(Fit.EXACT, ("instance_group.count",), _instances),
        "max_batch_size": Row(Fit.EXACT, ("max_batch_size",), _batch),
        "max_wait_ms": Row(Fit.EXACT, _DELAY, _delay),
        "token_budget": Row(Fit.UNSUPPORTED, said="Triton counts requests, whatever they cost", harmless=no_cost),
    },
    constraints=(),
    render=protobuf_text,
    command=_command,
)
