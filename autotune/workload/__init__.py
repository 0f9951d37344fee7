"""Arrival processes, length distributions and trace readers, all seeded."""
