"""The predictive controller, and the parts that it is made of."""

from autotune.control.controllers.predictive.controller import PredictiveController

__all__ = ["PredictiveController"]
