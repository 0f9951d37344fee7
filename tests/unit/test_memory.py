"""Huge pages are advice: what is in memory stays what it was, whatever the system makes of it."""

from __future__ import annotations

import sys

import psutil
import pytest
import torch

from runtime.torch_backend import memory
from runtime.torch_backend.cpu.linear import PackedLinear
from runtime.torch_backend.memory import HUGE, prefer_huge_pages, return_free_pages


@pytest.mark.parametrize("now", [True, False])
def test_contents_survive(now: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=generator) for n in (3, 200_000, HUGE, 2 * HUGE + 5)]
    copies = [t.clone() for t in tensors]
    for tensor in tensors:
        prefer_huge_pages(tensor, now)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    assert not prefer_huge_pages(tensors[0], now)  # too small to be worth a call


def test_packed_weights_survive() -> None:
    linear = torch.nn.Linear(512, 2048, bias=False)
    before = linear.weight.detach().clone()
    packed = PackedLinear(linear)
    packed.prefer_huge_pages(now=True)
    assert torch.equal(packed.weight, before)
    packed.prefer_huge_pages(now=True)  # the plain one is in its place now: nothing to do


def test_a_system_that_knows_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_madvise", lambda: lambda *_: -1)
    assert not prefer_huge_pages(torch.zeros(HUGE))
    monkeypatch.undo()
    memory._madvise.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "platform", "win32")
        assert not prefer_huge_pages(torch.zeros(HUGE))
    memory._madvise.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="malloc_trim is of the GNU C library")
def test_free_pieces_of_the_heap_go_back_to_the_system() -> None:
    """Small tensors between ones that stay."""
    if memory._malloc_trim() is None:
        pytest.skip("the C library has no malloc_trim")
    made = [torch.ones(16_000) for _ in range(2_000)]
    kept = made[::20]
    del made
    before = psutil.Process().memory_info().rss
    assert return_free_pages()
    assert before - psutil.Process().memory_info().rss > 64 << 20
    assert all(bool((tensor == 1).all()) for tensor in kept)


def test_a_c_library_that_cannot_return_free_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_malloc_trim", lambda: None)
    assert not return_free_pages()
