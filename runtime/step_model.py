"""Predicting the time of a step: the protocol that the offline cost model and the online learner both stand behind."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class StepFeatures(NamedTuple):
    """What a step's time depends on; the same numbers as in :class:`runtime.records.StepRecord`."""

    decodes: int
    decode_context: int
    prefill_tokens: int
    prefill_context: int
    prefill_attention: int


class StepModel(Protocol):
    """Predicts how long a step takes."""

    def predict(self, step: StepFeatures) -> float:
        """Seconds."""
        ...
