"""How much the predictive controller does in a step, in calls of functions: a count that no machine's speed changes."""

from __future__ import annotations

from autotune.control.controllers.predictive import PredictiveController
from benchmarks.overhead.controller import KNOBS, TARGET, learn, served
from tests.unit.counted_calls import calls

STEPS = 300


def test_a_step_takes_few_calls() -> None:
    """The load of ``benchmarks.overhead``, whose aim of 30 µs a step held with 140 calls to grant a budget and decide. A decision
    that summarised the latest requests anew, though nothing asked for it, made 300 of them and took 1.5 times the CPU time."""
    events = served(64, 2 * STEPS)
    made = PredictiveController(TARGET, KNOBS)
    learn(made, events[:STEPS], every=0.0)
    latest = events[STEPS:]

    def decide() -> None:
        for step, _, view in latest:
            made.budget(view)
            made.decide(step.end, view.knobs, view.effective_limits)

    assert calls(decide) / STEPS < 180
