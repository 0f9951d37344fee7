from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.llm.prefix import block_hashes, token_hasher
from runtime.request import Request, SamplingParams, Sequence

tokens = st.lists(st.integers(0, 5), max_size=40)


def sequence(prompt: list[int], output: list[int], block_size: int, salt: bytes = b"", tenant: str = "") -> Sequence:
    request = Request(
        id="r",
        prompt=tuple(prompt),
        params=SamplingParams(),
        max_tokens=100,
        arrival=0.0,
        tenant=tenant,
        block_hashes=block_hashes(prompt, block_size, salt),
    )
    made = Sequence(request)
    made.output.extend(output)
    return made


@given(tokens, tokens, st.integers(1, 5))
def test_equal_hashes_mean_equal_prefixes(a: list[int], b: list[int], block_size: int) -> None:
    for i, (x, y) in enumerate(zip(block_hashes(a, block_size), block_hashes(b, block_size), strict=False)):
        end = (i + 1) * block_size
        assert (x == y) == (a[:end] == b[:end])


@given(tokens, st.integers(1, 7))
def test_only_full_blocks_have_a_hash_of_128_bits(prompt: list[int], block_size: int) -> None:
    hashes = block_hashes(prompt, block_size)
    assert len(hashes) == len(prompt) // block_size
    assert all(0 <= h < 2**128 for h in hashes)


@given(tokens, tokens, st.integers(1, 5), st.binary(max_size=3))
def test_hasher_continues_the_chain_over_the_output(p: list[int], o: list[int], block_size: int, salt: bytes) -> None:
    made = sequence(p, [], block_size, salt)
    extend = token_hasher(block_size, lambda request: salt)
    for i, token in enumerate(o):
        made.output.append(token)
        if i % 3 == 0:  # it may be asked at any length, and again
            extend(made)
            extend(made)
    extend(made)
    assert tuple(made.hashes) == block_hashes(p + o, block_size, salt)


def test_salt_keeps_caches_apart() -> None:
    prompt = list(range(64))
    chains = [block_hashes(prompt, 16, salt) for salt in (b"", b"a", b"b", b"a" * 200)]
    assert len({h for chain in chains for h in chain}) == 16


def test_salt_of_a_request_shorter_than_a_block() -> None:
    extend = token_hasher(4, lambda request: request.tenant.encode())
    made = sequence([1, 2], [3, 4, 5], 4, b"acme", tenant="acme")
    extend(made)
    assert tuple(made.hashes) == block_hashes([1, 2, 3, 4], 4, b"acme")


def test_token_order_within_a_block_matters() -> None:
    assert block_hashes([1, 2], 2) != block_hashes([2, 1], 2)
    assert block_hashes([258], 1) != block_hashes([513], 1)


def test_bad_block_size() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        block_hashes([1], 0)
    with pytest.raises(ValueError, match="block_size is 0"):
        token_hasher(0)
