"""Request-level batching of any callable, with the knobs, records and terms of the LLM engine."""
