"""The engine that batches: four live knobs, an SLO, and records of every step and request. Knows nothing of autotune."""
