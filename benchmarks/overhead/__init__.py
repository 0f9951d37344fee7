"""What the machinery around the model costs; see :mod:`.__main__`."""
