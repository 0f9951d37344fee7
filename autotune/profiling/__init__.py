"""Searching the knobs on real hardware."""
