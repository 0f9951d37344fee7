"""Our controller on the live CPU engine against vLLM's defaults and the best fixed setting; see :mod:`.__main__`."""
