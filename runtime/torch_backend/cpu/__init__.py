"""What only a CPU does: contiguous rows for decoding, query tiles for prompts, linear layers in oneDNN's layout."""
