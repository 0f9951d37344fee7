"""Interactive and batch requests on one engine, in virtual time and live; see :mod:`.__main__`."""
