"""Parts of a profile that are conclusions: the calibration, the simulation, the confidence."""

from __future__ import annotations

from pydantic import Field

from autotune.cost.fields import AboveZero, Amount, Count, Part, Share


class Calibration(Part):
    """What was measured before the search, to scale the load: one request alone, then a saturated engine."""

    alone_ttft_ms: Amount
    alone_tpot_ms: Amount
    saturated_rate: Amount = Field(description="requests/s")
    saturated_tokens_per_s: Amount = Field(description="prompt and output tokens/s")
    step_base_ms: Amount
    step_per_prompt_token_ms: Amount
    step_per_decode_ms: Amount


class Confidence(Part):
    """How sure the choice is."""

    noise: Amount = Field(
        description="coefficient of variation of goodput between runs of one setting, at the least that of a share of so many "
        "requests"
    )
    best: Share = Field(
        description="probability that the recommended setting is the best of the validated ones; equals share it"
    )
    regret: Amount = Field(description="goodput it is expected to fall short of the best of them, as a share")
    sentence: str = Field(description="the same in words")


class Gain(Part):
    """Requests within the SLO with the recommended setting, over those with the baseline."""

    ratio: AboveZero
    low: Amount = Field(description="95% interval, block bootstrap")
    high: AboveZero
    requests: Count = Field(description="requests offered to the recommended setting in what is compared")
    paired: bool = Field(description="whether both met the same requests")


class SimulationFacts(Part):
    """The simulated stage, and how far off it was where both were measured."""

    trials: Count
    cpu_seconds: Amount
    pareto: Count = Field(description="settings on its Pareto front")
    goodput_error: Amount | None = Field(
        description="median of |simulated − measured| / measured over the validated points at the rate compared"
    )
    speed: float = Field(
        default=1.0,
        ge=1e-3,
        le=1e3,
        description="while it served, in units of what cost model and serving_overhead_s say; simulations go by it",
    )
