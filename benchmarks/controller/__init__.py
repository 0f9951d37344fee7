"""Controllers against fixed settings, each other and the best in hindsight, in simulation; see :mod:`.__main__`."""
