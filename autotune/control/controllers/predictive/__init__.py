"""The default controller: learns online how long a step takes, and allows the largest steps that meet the TPOT and ITL targets.

Where its predictions are wrong for long, the starting knobs come back. The controller is in :mod:`.controller`; the other modules
are its parts.
"""

from autotune.control.controllers.predictive.controller import PredictiveController

__all__ = ["PredictiveController"]
