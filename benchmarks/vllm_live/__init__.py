"""Our controller on live vLLM against its defaults and the best fixed settings; see :mod:`.__main__`."""
