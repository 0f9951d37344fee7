"""Measuring one setting: engine, knobs or controller, workload, SLO and seed in, a score out."""
