"""Tests, in tiers by folder. See ``conftest.py`` for what each folder means."""
