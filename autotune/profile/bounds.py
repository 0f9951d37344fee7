"""Figures beyond which nothing is a machine or a load: the same for options and for profiles."""

from __future__ import annotations

from typing import Final

LEAST_RATE: Final = 1e-6  # requests/s
MOST_RATE: Final = 1e6
MOST_KV_TOKENS: Final = 2**30
"""In a KV pool: far more than the memory of any machine of today holds."""
