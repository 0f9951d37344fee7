"""What clients may send: every field arrives, and what cannot be honoured is refused by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from pydantic import ValidationError

from runtime.request import SamplingParams
from runtime.serving.errors import ApiError, api_error, validation_error
from runtime.serving.protocol import IGNORED, UNSUPPORTED, ChatRequest, CompletionRequest, GenerationRequest

HELLO = [{"role": "user", "content": "hello"}]


def completion(**body: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "hello", **body})


def chat(**body: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": HELLO, **body})


def refused(kind: type[GenerationRequest], body: Any) -> ApiError:
    try:
        kind.model_validate(body).sampling()
    except ApiError as error:
        return error
    except ValidationError as error:
        return validation_error(error.errors(), kind.model_fields)
    except ValueError as error:
        return ApiError(400, str(error))
    raise AssertionError(f"{body} was accepted")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hello", ["hello"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [""]),  # the engine says what is wrong with it
    ],
)
def test_the_four_kinds_of_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize("prompt", [1, 1.5, {}, [], [1, "a"], [[1], "a"], [[1.0]], [True], [None]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    error = refused(CompletionRequest, {"prompt": prompt})
    assert (error.status, error.param) == (400, "prompt")
    assert error.message.startswith("prompt is [") or "it must be text, a list of texts" in error.message


def test_defaults_are_those_of_openai() -> None:
    assert completion().sampling() == SamplingParams(max_tokens=16, temperature=1.0)
    assert chat().sampling() == SamplingParams(max_tokens=None, temperature=1.0)


def test_a_model_has_defaults_of_its_own_for_what_a_request_does_not_name() -> None:
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    assert completion().sampling(own) == SamplingParams(max_tokens=16, **own)  # type: ignore[arg-type]
    asked = chat(temperature=0, top_k=-1, repetition_penalty=1.0, top_p=None).sampling(own)
    assert asked == SamplingParams(max_tokens=None, temperature=0.0, top_k=0, repetition_penalty=1.0, top_p=0.95)


def test_every_sampling_field_arrives() -> None:
    body: dict[str, Any] = {
        "max_tokens": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "seed": 4,
        "stop": ["x", "y"], "stop_token_ids": [5], "ignore_eos": True, "logprobs": 2,
    }  # fmt: skip
    assert set(body) == {f.name for f in fields(SamplingParams)}, "a new field must be served too"
    expected = SamplingParams(**{**body, "stop": ("x", "y"), "stop_token_ids": (5,)})
    assert completion(**body).sampling() == expected
    assert chat(**{**body, "logprobs": True, "top_logprobs": 2}).sampling() == expected


def test_spellings_of_others() -> None:
    assert completion(stop="x").sampling().stop == ("x",)
    assert completion(top_k=-1).sampling().top_k == 0
    assert chat(max_tokens=3, max_completion_tokens=5).sampling().max_tokens == 5
    assert chat(logprobs=True).sampling().logprobs == 0
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "ab"
    assert completion(temperature=1).temperature == 1.0


def test_an_answer_that_is_sent_back_holds_empty_fields() -> None:
    echoed = {"role": "assistant", "content": "a", "annotations": [], "tool_calls": [], "refusal": "", "audio": {}}
    (message,) = chat(messages=[echoed]).messages
    assert message.as_dict() == {"role": "assistant", "content": "a"}
    error = refused(ChatRequest, {"messages": [{**echoed, "tool_calls": [{"id": "1"}]}]})
    assert (error.param, error.message) == ("messages", "messages.0.tool_calls is not a field")
    assert refused(ChatRequest, {"messages": [{**echoed, "tols": []}]}).message.startswith("messages.0.tols")


def test_null_is_as_good_as_nothing() -> None:
    nothing = dict.fromkeys([*GenerationRequest.model_fields, *UNSUPPORTED, *IGNORED])
    assert completion(**nothing) == completion()
    assert chat(**nothing) == chat()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_named_unless_it_changes_nothing(name: str) -> None:
    for neutral in UNSUPPORTED[name]:
        assert completion(**{name: neutral}) == completion()
    error = refused(CompletionRequest, {"prompt": "a", name: 3})
    assert (error.status, error.param) == (400, name)
    assert error.message.startswith(f"{name} is 3; it is not supported here: it must be ")


def test_true_is_not_one() -> None:
    assert refused(CompletionRequest, {"prompt": "a", "n": True}).param == "n"
    assert completion(frequency_penalty=0.0) == completion(echo=False) == completion()


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt": "a", "max_tokens": "3"}, "max_tokens", 'max_tokens is "3"; it must be a valid integer'),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5; it must be a valid integer"),
        ({"prompt": "a", "user": 7}, "user", "user is 7; it must be a valid string"),
        ({"prompt": "a", "stream": "yes"}, "stream", 'stream is "yes"; it must be a valid boolean'),
        ({"prompt": "a", "stop": [""]}, "stop", 'stop is [""]; it must be non-empty text, or a list of such'),
        ({"prompt": "a", "temprature": 1}, "temprature", "temprature is not a field; the fields are model, stream,"),
        ({}, "prompt", "prompt is missing"),
        ({"prompt": "a", "stream_options": {"usage": True}}, "stream_options", "stream_options.usage is not a field"),
        ({"prompt": "a", "seed": 1.5, "top_p": "x"}, "top_p", "top_p is"),
        ("text", None, "the body must be a JSON object"),
    ],
)
def test_a_wrong_body_is_one_line_that_names_the_field(body: Any, param: str | None, says: str) -> None:
    error = refused(CompletionRequest, body)
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(says) and "\n" not in error.message
    assert error.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_a_wrong_chat_body(body: Any, param: str) -> None:
    error = refused(ChatRequest, body)
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(param)


@pytest.mark.parametrize("body", [{"stop_token_ids": ["x"] * 20_000}, {"messages": [{"role": 1}] * 20_000}])
def test_a_list_is_checked_as_far_as_its_first_wrong_item(body: Any) -> None:
    """Only that one is in the answer, and a list of thousands would hold up the event loop."""
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate({"messages": HELLO, **body})
    assert raised.value.error_count() == 1


def test_top_logprobs_need_logprobs() -> None:
    assert "it needs logprobs to be true" in refused(ChatRequest, {"messages": HELLO, "top_logprobs": 2}).message


def test_retry_after_is_whole_seconds_and_milliseconds() -> None:
    assert ApiError(429, "full", retry_after_s=0.2).headers == {"retry-after": "1", "retry-after-ms": "200"}
    assert ApiError(429, "full", retry_after_s=2.0004).headers == {"retry-after": "3", "retry-after-ms": "2001"}
    assert api_error(KeyError("x")).status == 500
