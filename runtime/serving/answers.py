"""What clients get: whole answers, and the events of a streamed one.

An event is put together from bytes that do not change over a response and the token's own text: this runs once a token, in
the process whose other thread drives the model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Final, Protocol

from runtime.llm.buffer import TokenEvent
from runtime.llm.stream import Completion, TokenLogprob
from runtime.records import RequestRecord

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB: Final = -9999.0
"""In place of what is less, such as −∞, which JSON has no number for; as in OpenAI's answers."""
Decode = Callable[[list[int]], str]


def usage(prompt: int, output: int, cached: int | None = None) -> dict[str, Any]:
    counted: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }
    if cached is not None:
        counted["prompt_tokens_details"] = {"cached_tokens": cached}
    return counted


def usage_of(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Usage of all prompts of one call."""
    return usage(
        sum(r.prompt_tokens for r in records),
        sum(r.output_tokens for r in records),
        sum(r.cached_tokens for r in records),
    )


class Shape(Protocol):
    """How one of the two endpoints spells its answers."""

    kind: str
    chunk_kind: str

    def whole(self, completion: Completion, index: int, events: Iterable[TokenEvent]) -> dict[str, Any]:
        """One choice of a whole answer. ``events``: those of its stream."""
        ...

    def head(self, index: int, first: bool) -> str:
        """JSON of one choice of an event, up to the token's text."""
        ...

    def tail(self, logprobs: str, finish_reason: str) -> str:
        """And from behind the text on."""
        ...

    def logprobs(self, tokens: Sequence[TokenLogprob], offsets: Sequence[int]) -> dict[str, Any]:
        """``offsets``: characters of text before each of them."""
        ...


class TokenText:
    """The text of single tokens, for log-probabilities; those that show none by themselves are named by their id.

    It is what a token adds behind itself: some tokenizers, such as Llama 2's, leave out the space in front of a whole text.
    """

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._shown(token_id) or id_of(token_id)
        return text

    def raw(self, token_id: int) -> list[int] | None:
        """Its bytes, where they are known: those of a piece of a character are not."""
        text = self(token_id)
        return None if text == id_of(token_id) else list(text.encode())

    def _shown(self, token_id: int) -> str:
        if self._decode is None:
            return ""
        text = self._decode([token_id] * 2)[len(self._decode([token_id])) :]
        return "" if "\ufffd" in text else text


def id_of(token_id: int) -> str:
    """The name of a token whose text does not tell it."""
    return f"token_id:{token_id}"


class CompletionShape:
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, text: TokenText) -> None:
        self._text = text

    def whole(self, completion: Completion, index: int, events: Iterable[TokenEvent]) -> dict[str, Any]:
        logprobs = None
        if completion.logprobs is not None:
            offsets = [*accumulate((len(event.text) for event in events), initial=0)]
            logprobs = self.logprobs(completion.logprobs, offsets[:-1])
        return {
            "index": index,
            "text": completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason.value,
        }

    def head(self, index: int, first: bool) -> str:
        return f'{{"index":{index},"text":'

    def tail(self, logprobs: str, finish_reason: str) -> str:
        return f',"logprobs":{logprobs},"finish_reason":{finish_reason}}}'

    def logprobs(self, tokens: Sequence[TokenLogprob], offsets: Sequence[int]) -> dict[str, Any]:
        named = [self._named(token) for token in tokens]
        return {
            "tokens": [name for name, _ in named],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [likeliest for _, likeliest in named],
            "text_offset": list(offsets),
        }

    def _named(self, token: TokenLogprob) -> tuple[str, dict[str, float]]:
        """Its name, and the log-probabilities in its place by name. Of tokens with one text the likeliest is named by it."""
        name, likeliest = "", dict[str, float]()
        sampled = (token.token_id, token.logprob)
        for token_id, logprob in dict([*token.top, sampled]).items():
            text = self._text(token_id)
            key = id_of(token_id) if text in likeliest else text
            likeliest[key] = _finite(logprob)
            if token_id == token.token_id:
                name = key
        return name, likeliest


class ChatShape:
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, text: TokenText) -> None:
        self._text = text

    def whole(self, completion: Completion, index: int, events: Iterable[TokenEvent]) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": None if completion.logprobs is None else self.logprobs(completion.logprobs, ()),
            "finish_reason": completion.finish_reason.value,
        }

    def head(self, index: int, first: bool) -> str:
        # the role comes with the first token, not before it: an event without a token would be taken for one
        role = '"role":"assistant",' if first else ""
        return f'{{"index":{index},"delta":{{{role}"content":'

    def tail(self, logprobs: str, finish_reason: str) -> str:
        return f'}},"logprobs":{logprobs},"finish_reason":{finish_reason}}}'

    def logprobs(self, tokens: Sequence[TokenLogprob], offsets: Sequence[int]) -> dict[str, Any]:
        return {"content": [self._one(t) | {"top_logprobs": [self._one(top) for top in t.top]} for t in tokens]}

    def _one(self, token: TokenLogprob | tuple[int, float]) -> dict[str, Any]:
        token_id, logprob = token[0], token[1]
        return {"token": self._text(token_id), "logprob": _finite(logprob), "bytes": self._text.raw(token_id)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def frame(answer_id: str, kind: str, model: str) -> dict[str, Any]:
    """What every answer and event begins with."""
    return {
        "id": answer_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


class Events:
    """The events of one streamed answer, as bytes.

    ``prompt_tokens`` of each choice: usage so far then stands on every event. ``closing_usage``: the whole usage comes in an
    event of its own at the end, and every other says ``null``.
    """

    def __init__(
        self, shape: Shape, begin: dict[str, Any], *, closing_usage: bool, prompt_tokens: Sequence[int] | None = None
    ) -> None:
        self._shape = shape
        self._begin = "data: " + json.dumps(begin)[:-1] + ', "choices":['
        self._null = ',"usage":null' if closing_usage else ""
        self._closing_usage = closing_usage
        self._prompt_tokens = prompt_tokens
        self._plain = shape.tail("null", "null") + "]"
        self._heads: dict[int, str] = {}
        self._offsets: dict[int, int] = {}

    def token(self, index: int, event: TokenEvent) -> bytes:
        """The event of one token of choice ``index``."""
        head = self._heads.get(index)
        if head is None:
            self._heads[index] = self._begin + self._shape.head(index, first=False)
            head = self._begin + self._shape.head(index, first=True)
        plain = event.logprob is None and event.finish_reason is None
        tail = self._plain if plain else self._tail(index, event)
        counted = self._null if self._prompt_tokens is None else self._so_far(self._prompt_tokens[index], event)
        return f"{head}{json.dumps(event.text)}{tail}{counted}}}\n\n".encode()

    def end(self, records: Sequence[RequestRecord]) -> bytes:
        """What follows the last token."""
        if not self._closing_usage:
            return DONE
        return f'{self._begin}],"usage":{json.dumps(usage_of(records))}}}\n\n'.encode() + DONE

    def _tail(self, index: int, event: TokenEvent) -> str:
        logprobs, finish = "null", "null"
        if event.logprob is not None:
            offset = self._offsets.get(index, 0)
            self._offsets[index] = offset + len(event.text)
            token = TokenLogprob(event.token_id, event.logprob, event.top_logprobs)
            logprobs = json.dumps(self._shape.logprobs([token], [offset]))
        if event.finish_reason is not None:
            finish = json.dumps(event.finish_reason.value)
        return self._shape.tail(logprobs, finish) + "]"

    def _so_far(self, prompt: int, event: TokenEvent) -> str:
        return f',"usage":{json.dumps(usage(prompt, event.position + 1))}'
