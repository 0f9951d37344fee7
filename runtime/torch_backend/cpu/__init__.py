"""What only a CPU does: kernels of our own in C, compiled where they run, and linear layers in oneDNN's layout."""
