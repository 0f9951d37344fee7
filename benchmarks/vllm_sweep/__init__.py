"""What profiling finds on live vLLM, and for how much of its time, against other searches; see :mod:`.__main__`."""
