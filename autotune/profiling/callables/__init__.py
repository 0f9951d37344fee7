"""Profiling a callable that takes a list, as the LLM engine is profiled: calibrate, simulate, measure, write a YAML profile."""
