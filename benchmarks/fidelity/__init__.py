"""What the simulator says of a load against what the live engine does; see :mod:`.__main__`."""
