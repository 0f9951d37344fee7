"""Fixtures that several integration tests share."""

from __future__ import annotations

import pytest

from tests.integration.llama_folder import llama_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a Llama of two small layers, to be read only."""
    return str(llama_folder(tmp_path_factory.mktemp("models") / "small"))
