"""What benchmarks of a live engine have in common: loads, contenders, their turns, and the ratios of what came of them."""
