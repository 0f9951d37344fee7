"""How the presets of real traces are fitted, and how near they come."""
