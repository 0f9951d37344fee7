"""What the engine and the batcher both use: one implementation of each."""
