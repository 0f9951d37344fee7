"""What clients send: the bodies of OpenAI's completions and chat completions, with the fields that vLLM adds.

A field that cannot be honoured is refused by name unless it holds the value that changes nothing; an unknown one is refused
with a list of those there are. ``null`` is as good as leaving a field out. Ranges of sampling fields are those of
:class:`runtime.request.SamplingParams`, which checks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from runtime.request import SamplingParams
from runtime.serving.errors import ApiError, shown

Prompt = str | list[int]

UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}
"""Fields that would change the answer and cannot, with the values that ask for nothing."""

IGNORED: Final = frozenset(
    {"metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)
"""Fields that say something about the client and nothing about the answer."""

ECHOED: Final = frozenset({"annotations", "tool_calls", "refusal", "audio"})
"""Fields of an assistant's message that clients send back as they got them; where they are empty they ask for nothing."""

MAX_TOP_LOGPROBS = 20


def _prompts(value: object) -> list[Prompt]:
    """Text, texts, token ids, or lists of token ids; always as a list of prompts."""
    allowed = "it must be text, a list of texts, a list of token ids or a list of lists of token ids"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"is {shown(value)}; {allowed}")
    if not value:
        raise ValueError("is []; it must hold at least one prompt")
    if all(type(item) is int for item in value):
        return [value]
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
        return value
    raise ValueError(f"is {shown(value)}; {allowed}")


def _stops(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"is {shown(value)}; it must be non-empty text, or a list of such")
    return tuple(texts)


def _content(value: object) -> str:
    """The text of a message: as it is, or in parts of type ``text``."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"is {shown(value)}; it must be text or a list of parts of type text")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'holds {shown(part)}; only parts {{"type": "text", "text": "..."}} are supported')
    return "".join(part["text"] for part in value)


class Part(BaseModel):
    """JSON as it stands: no number out of text, no text out of a number, no unknown field."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class StreamOptions(Part):
    """``continuous_usage_stats``: usage so far on every event, as vLLM has it."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Message(Part):
    role: str
    content: Annotated[str, BeforeValidator(_content)] = ""
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_what_is_empty(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: given for name, given in value.items() if name not in ECHOED or given not in ([], {}, "")}

    def as_dict(self) -> dict[str, str]:
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self.content, **named}


class GenerationRequest(Part):
    """What both endpoints understand. ``model`` may be left out: there is one. ``priority``: higher ones go first.
    ``request_class``: whose SLO applies to it, one of the engine's. ``user``: the engine's ``tenant``."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = None
    temperature: float = 1.0  # OpenAI's default; the engine's own is 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    stop_token_ids: Annotated[list[int], FailFast()] = []
    ignore_eos: bool = False
    priority: int = 0
    request_class: str = "default"
    user: str = ""

    @model_validator(mode="before")
    @classmethod
    def _without_what_changes_nothing(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = {}
        for name, given in value.items():
            if given is None or name in IGNORED:
                continue
            if name in UNSUPPORTED:
                if not _changes_nothing(name, given):
                    allowed = " or ".join(shown(neutral) for neutral in UNSUPPORTED[name])
                    raise ApiError(
                        400,
                        f"{name} is {shown(given)}; it is not supported here: it must be {allowed}, or left out",
                        param=name,
                        code="unsupported_value",
                    )
                continue
            kept[name] = given
        return kept

    def output_tokens(self) -> int | None:
        """Most tokens to answer with; None fills the context."""
        raise NotImplementedError

    def wanted_logprobs(self) -> int | None:
        raise NotImplementedError

    def sampling(self, defaults: Mapping[str, float] = MappingProxyType({})) -> SamplingParams:
        """``defaults``: the model's own, by field, for what the request does not name.

        Raises ``ValueError`` naming the field, its value and what is allowed.
        """
        requested = SamplingParams(
            max_tokens=self.output_tokens(),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,  # as in vLLM: all of them
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=self.wanted_logprobs(),
        )
        unnamed = {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        return replace(requested, **unnamed) if unnamed else requested  # type: ignore[arg-type]  # fields of it, each checked


def _changes_nothing(name: str, given: object) -> bool:
    return any(
        given == neutral and isinstance(given, bool) == isinstance(neutral, bool) for neutral in UNSUPPORTED[name]
    )


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``. A list of prompts has one answer each, by index."""

    prompt: Annotated[list[Prompt], BeforeValidator(_prompts)]
    logprobs: int | None = None

    def output_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default

    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    def output_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def wanted_logprobs(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise ValueError(f"top_logprobs is {self.top_logprobs}; it needs logprobs to be true")
            return None
        return self.top_logprobs or 0
