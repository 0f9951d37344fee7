"""Continuous (iteration-level) batching of language models."""
