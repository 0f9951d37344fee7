"""What benchmarks of a live engine have in common: the loads, the contenders, their turns, and the ratios of what came of them."""
