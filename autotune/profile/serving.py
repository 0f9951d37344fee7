"""What a profile says of its machine while it serves: its speed, what a step costs, and what the online learner begins with."""

from __future__ import annotations

from autotune.cost.model import CostModel
from autotune.profile.document import Profile
from runtime.step_model import Knowledge, StepFeatures

_PROMPT = 2048  # tokens of a step by which prompts are timed


def serving_speed(profile: Profile) -> float:
    """How fast the profile's machine was while it served, in units of what its cost model and ``serving_overhead_s`` say."""
    return 1.0 if profile.simulation is None else profile.simulation.speed


def serving_cost(profile: Profile) -> CostModel:
    """What a step costs on the profile's machine while it serves: cost model and what serving adds, at :func:`serving_speed`.

    Whatever predicts from a profile goes by this; only a comparison with the calibration itself (``autotune check``) goes by
    the cost model as it was fitted. Raises ``ValueError`` when the profile holds none.
    """
    if profile.cost_model is None:
        raise ValueError("the profile holds no cost model")
    cost, speed = CostModel(profile.cost_model).serving(), serving_speed(profile)
    return cost if speed == 1.0 else cost.scaled(compute=speed, bandwidth=speed, overhead=speed)


def prefill_rate(profile: Profile) -> float | None:
    """Prompt tokens a second while nothing else is computed, by the profile; None when it holds no cost model."""
    if profile.cost_model is None:
        return None
    most = min(_PROMPT, profile.engine.limits.token_budget, profile.model.max_model_len)
    return most / serving_cost(profile).predict(StepFeatures(0, 0, most, most, most * (most + 1) // 2, 1))


def serving_knowledge(profile: Profile) -> Knowledge | None:
    """What the online learner begins with: that and what serving adds, at :func:`serving_speed`; None when nothing is known."""
    if profile.cost_model is None or (facts := profile.cost_model.learner) is None:
        return None
    more = profile.cost_model.serving_overhead_s / facts.unit_s
    decode, mixed = ((row[0] + more, *row[1:]) if any(row) else row for row in (facts.decode, facts.mixed))
    unit = facts.unit_s / serving_speed(profile)
    return Knowledge(unit, decode, facts.decode_covariance, mixed, facts.mixed_covariance)
