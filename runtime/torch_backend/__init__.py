"""The torch backend: the only place that imports torch and transformers."""
