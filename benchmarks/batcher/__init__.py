"""The Batcher over HTTP against its peers, and in virtual time against others' rules; see :mod:`.__main__`."""
