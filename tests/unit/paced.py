"""A real engine whose executor takes known times, and a workload small enough for it: profiling in a second or two."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autotune.profile import ModelFacts
from runtime.knobs import KnobLimits
from runtime.llm.engine import Engine
from runtime.llm.plan import StepPlan, StepResult
from tests.fakes import FakeExecutor, FakeModel

LIMITS = KnobLimits(max_batch_size=64, max_wait_ms=50, token_budget=512, chunk_size=512)
WORKLOAD = "poisson:rate=40,prompt=12,output=4"
FACTS = ModelFacts(
    name="fake", architecture="none", parameters=1, dtype="float32", random_weights=True, seed=0, max_model_len=256,
    vocab_size=256, kv_bytes_per_token=1,
)  # fmt: skip


class PacedExecutor(FakeExecutor):
    """Sleeps ``base + per_token · tokens`` seconds a step."""

    def __init__(self, base: float = 0.002, per_token: float = 0.0001, **options: Any) -> None:
        super().__init__(**options)
        self.base, self.per_token = base, per_token

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        time.sleep(self.base + self.per_token * (plan.n_decode + plan.prefill_tokens))
        return super().execute(plan, now, until)


@contextmanager
def paced(base: float = 0.002, per_token: float = 0.0001, **options: Any) -> Iterator[Engine]:
    executor = PacedExecutor(base, per_token, **options)
    engine = Engine(FakeModel(), executor=executor, kv_tokens=4096, limits=LIMITS)
    try:
        yield engine
    finally:
        engine.close(drain=False)
