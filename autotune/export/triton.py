"""Triton Inference Server's dynamic batcher: a ``config.pbtxt``.

Fields are those of ``model_config.proto``. Without preferred sizes the batcher waits until ``max_batch_size`` requests are there
or the oldest has waited ``max_queue_delay_microseconds``. What is not named here, a server completes for backends that can
describe their models (unless it is started with ``--disable-auto-complete-config``).
"""

from __future__ import annotations

from autotune.export.files import protobuf_text
from autotune.export.rows import FACTS_OF_THE_MODEL, as_calls, batches_calls, no_cost, no_wait
from autotune.export.source import ProfiledCallable, Source
from autotune.export.target import ExportTarget, Fit, Row, Written

_MICROSECONDS = 1000


def _batch(source: Source) -> Written:
    return {"max_batch_size": source.knobs.max_batch_size}


def _delay(source: Source) -> Written:
    key = "dynamic_batching.max_queue_delay_microseconds"
    return {key: round(source.knobs.max_wait_ms * _MICROSECONDS)}


def _instances(source: ProfiledCallable) -> Written:
    return {"instance_group.count": source.profile.replicas}


def _where(source: Source) -> str:
    return "the lines belong into config.pbtxt of the model in the repository, beside its backend, inputs and outputs"


def _each_gpu(source: ProfiledCallable) -> str:
    gpu = source.profile.machine.gpu
    return (
        "" if gpu is not None and gpu.count > 1 else "on a machine with one GPU or none, as here, that is all of them"
    )


_DELAY = ("dynamic_batching.max_queue_delay_microseconds",)

TRITON = ExportTarget(
    name="triton",
    title="Triton's dynamic batcher",
    version="2",
    filename="config.pbtxt",
    suffixes=(".pbtxt",),
    knobs=as_calls(
        Row(Fit.APPROXIMATE, ("max_batch_size",), _batch, said=batches_calls("Triton"), about=_where),
        Row(Fit.APPROXIMATE, _DELAY, _delay, said="Triton waits for requests, not for their tokens", harmless=no_wait),
        "Triton",
    ),
    facts=FACTS_OF_THE_MODEL,
    calls={
        "replicas": Row(
            Fit.APPROXIMATE,
            ("instance_group.count",),
            _instances,
            said="Triton makes so many for each GPU that it sees",
            harmless=_each_gpu,
        ),
        "max_batch_size": Row(Fit.EXACT, ("max_batch_size",), _batch, about=_where),
        "max_wait_ms": Row(Fit.EXACT, _DELAY, _delay),
        "token_budget": Row(Fit.UNSUPPORTED, said="Triton counts requests, whatever they cost", harmless=no_cost),
    },
    constraints=(),
    render=protobuf_text,
    command=lambda model, path: "tritonserver --model-repository REPOSITORY",
)
