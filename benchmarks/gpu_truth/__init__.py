"""Step times of real GPUs, composed from public measurements: hardware for benchmarks and tests that need no GPU."""

from benchmarks.gpu_truth.engine import simulated_engine
from benchmarks.gpu_truth.truth import ALL, BASE, COARSE, LADDER, RECORDED, Flags, Truth, load, names

__all__ = ["ALL", "BASE", "COARSE", "LADDER", "RECORDED", "Flags", "Truth", "load", "names", "simulated_engine"]
