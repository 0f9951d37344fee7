"""A pool that no machine could hold is refused before anything is allocated."""

from __future__ import annotations

import psutil
import pytest

from runtime.torch_backend.kv_pool import check_pool
from tests.unit.executor_harness import tiny


def test_a_pool_larger_than_the_machine() -> None:
    loaded = tiny()
    most = psutil.virtual_memory().total // loaded.kv_bytes_per_token
    check_pool(loaded, most)
    with pytest.raises(
        ValueError,
        match=f"kv_tokens is {2 * most}; the KV pool would take .* GiB, and cpu has .*it must be below {most}",
    ):
        check_pool(loaded, 2 * most)
