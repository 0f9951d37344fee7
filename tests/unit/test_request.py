"""What a client may ask for, and what it is told when it asks for something else."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from runtime.request import Request, SamplingParams, Sequence


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens is 0; it must be a whole number at least 1"),
        ("max_tokens", 1.5, "max_tokens is 1.5; it must be a whole number at least 1"),
        ("temperature", -0.1, "temperature is -0.1; it must be at least 0 and at most 100"),
        ("temperature", math.nan, "temperature is nan; it must be at least 0 and at most 100"),
        ("temperature", "hot", "temperature is 'hot'; it must be at least 0 and at most 100"),
        ("temperature", None, "temperature is None; it must be at least 0 and at most 100"),
        ("top_k", -1, "top_k is -1; it must be a whole number at least 0"),
        ("top_k", True, "top_k is True; it must be a whole number at least 0"),
        ("top_p", 0, "top_p is 0; it must be above 0 and at most 1"),
        ("top_p", 1.01, "top_p is 1.01; it must be above 0 and at most 1"),
        ("min_p", 2, "min_p is 2; it must be at least 0 and at most 1"),
        ("repetition_penalty", 0, "repetition_penalty is 0; it must be at least 0.001 and at most 100"),
        ("logprobs", 101, "logprobs is 101; it must be a whole number at least 0 and at most 100"),
        ("seed", 0.5, "seed is 0.5; it must be a whole number at least -9.22337e+18 and at most 9.22337e+18"),
        ("stop", ("",), "stop is ('',); every stop string must be non-empty text"),
        ("stop", "", "stop is ('',); every stop string must be non-empty text"),
        ("stop", (1,), "stop is (1,); every stop string must be non-empty text"),
        ("stop", 7, "stop is 7; it must be a list of texts"),
        ("stop_token_ids", 7, "stop_token_ids is 7; it must be a list of token ids"),
        ("stop_token_ids", [-1], "stop_token_ids is -1; it must be a whole number at least 0"),
        ("stop", ("a",) * 65, "stop has 65 texts of up to 1 characters; it must have at most 64 of at most 1024"),
        ("stop", (1,) * 65, f"stop is {(1,) * 65!r}; every stop string must be non-empty text"),
        ("stop", "a" * 1025, "stop has 1 texts of up to 1025 characters; it must have at most 64 of at most 1024"),
        ("stop_token_ids", range(257), "stop_token_ids has 257 ids; it must have at most 256"),
        ("stop_token_ids", ["a"], "stop_token_ids is 'a'; it must be a whole number at least 0"),
    ],
)
def test_bad_sampling_parameters_name_field_value_and_bounds(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value) == message


def test_what_may_be_left_open() -> None:
    open_ended = SamplingParams(max_tokens=None, seed=None, logprobs=None)
    assert (open_ended.max_tokens, open_ended.seed, open_ended.logprobs) == (None, None, None)
    assert SamplingParams(logprobs=0).logprobs == 0


def test_one_stop_string_or_a_list_of_them() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)  # type: ignore[arg-type]


def test_parameters_are_frozen_and_greedy_unless_said() -> None:
    params = SamplingParams()
    assert params.greedy and not SamplingParams(temperature=0.7).greedy
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


def request(prompt: tuple[int, ...] = (1, 2, 3), **changes: Any) -> Request:
    return Request(id="r", prompt=prompt, params=SamplingParams(), max_tokens=4, arrival=0.0, **changes)


def test_a_simulated_prompt_has_a_length_and_no_tokens() -> None:
    assert request().prompt_len == 3
    assert request((), prompt_len=500).prompt_len == 500


def test_two_equal_requests_are_two_requests() -> None:
    assert request() != request()
    assert len({request(), request()}) == 2


def test_a_new_sequence_has_computed_nothing() -> None:
    sequence = Sequence(request(block_hashes=(11, 12)))
    assert (sequence.state, sequence.computed, sequence.target, sequence.generated) == ("waiting", 0, 3, 0)
    assert sequence.hashes == [11, 12] and sequence.hashes is not sequence.request.block_hashes
    assert repr(sequence) == "<Sequence r waiting computed=0/3 out=0>"
    with pytest.raises(AttributeError):
        sequence.finish_time = 1.0  # type: ignore[attr-defined]
