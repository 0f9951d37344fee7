"""Who serves both classes: each from vLLM's defaults on, but for fixed settings."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from autotune import control
from autotune.engines import Engine
from autotune.engines.defaults import VLLM_DEFAULTS
from autotune.measure.evaluate import evaluate
from autotune.measure.score import Score
from autotune.workload import Workload
from benchmarks.attached import at_work
from benchmarks.classes.loads import CHAT
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.records import RequestRecord
from runtime.slo import SLO, RequestClass

DEFAULT, DEFAULTS = "default", "defaults"
CONTENDERS: Final = (DEFAULT, "reject", "knobs", DEFAULTS)
FIXED: Final = "fixed-"
LIMITS: Final = KnobLimits()
KNOBS: Final[Knobs] = LIMITS.clamp(VLLM_DEFAULTS)
_POLICIES: dict[str, AdmissionPolicy | bool] = {DEFAULT: True, "reject": AdmissionPolicy(late="reject")}


def known(name: str) -> str:
    """The type of an option: one of :data:`CONTENDERS`, or ``fixed-512``, ``fixed-640`` and the like."""
    tokens = name.removeprefix(FIXED)
    if name in CONTENDERS or (tokens != name and tokens.isdecimal() and 1 <= int(tokens) <= LIMITS.token_budget):
        return name
    allowed = ", ".join(CONTENDERS)
    raise ArgumentTypeError(f"{name}; it must be one of {allowed}, or {FIXED}1 to {FIXED}{LIMITS.token_budget}")


@contextmanager
def contender(name: str, engine: Engine, slo: SLO) -> Iterator[None]:
    """``engine`` under control, as ``name`` has it."""
    if name == DEFAULTS:
        yield
        return
    fixed = name.startswith(FIXED)
    if fixed:
        tokens = int(name.removeprefix(FIXED))
        engine.set_knobs(KNOBS.with_(token_budget=tokens, chunk_size=tokens))
    controller = "static" if fixed else "predictive"
    with at_work(control(engine, slo=slo, controller=controller, admission=fixed or _POLICIES.get(name, False))):
        yield


def serve(
    name: str,
    engine: Engine,
    load: Workload,
    classes: Sequence[RequestClass],
    *,
    seed: int,
    window: float,
    warmup: float,
    vocab_size: int = 2,
    prompt_seed: int | None = None,
    label: str = "run",
    stop: Callable[[], bool] | None = None,
    keep: Callable[[Sequence[RequestRecord]], None] | None = None,
) -> Score:
    """How ``name`` serves ``load`` on an idle engine at :data:`KNOBS`.

    Raises :class:`~autotune.measure.evaluate.EvaluationError`, and :class:`~runtime.errors.InputError` where its controller
    failed.
    """
    slo = next(one.slo for one in classes if one.name == CHAT)
    with contender(name, engine, slo):
        return evaluate(
            engine, None, load, slo, classes=classes, vocab_size=vocab_size, seed=seed, prompt_seed=prompt_seed,
            duration=window, warmup=warmup, label=label, stop=stop, keep=keep,
        )  # fmt: skip
