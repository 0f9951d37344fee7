"""What several of the rivals of the predictive controller are made of: a window of steps, and limits of tokens in whole tiles."""
