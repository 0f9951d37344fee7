"""Clocks for measuring on a machine that is not all ours."""
