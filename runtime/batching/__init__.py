"""Request-level batching of any callable, with the knobs, records and words of the LLM engine."""
