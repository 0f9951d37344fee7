"""What the benchmarks of vLLM have in common: a model directory, how vLLM is started, and the loads it serves."""
