"""Fixtures of the unit tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory of one's own with a short name: a socket's path may have some hundred bytes, pytest's are longer."""
    with tempfile.TemporaryDirectory(prefix="at-") as folder:
        yield Path(folder)
