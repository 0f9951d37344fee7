"""What tuning gains over vLLM's defaults, by GPU, requests and SLO, in virtual time; see :mod:`.__main__`."""
