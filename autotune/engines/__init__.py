"""What can be measured and tuned: the protocol of an engine, and the engines behind it."""
