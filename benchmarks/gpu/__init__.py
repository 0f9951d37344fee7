"""``python -m benchmarks.gpu`` runs every check and benchmark that needs a GPU, in parts, and writes down their results."""
