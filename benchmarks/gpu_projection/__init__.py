"""What a step would take on a GPU that nobody has here: the decoder's own calls, counted, on published figures of four GPUs."""
