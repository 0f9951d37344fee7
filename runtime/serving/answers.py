"""What clients get: whole answers, and the events of a streamed one.

An event is put together from bytes that do not change over a response and the token's own text: this runs once a token, in
the process whose other thread drives the model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

from runtime.llm.buffer import TokenEvent
from runtime.llm.stream import Completion, TokenLogprob
from runtime.records import RequestRecord

DONE = b"data: [DONE]\n\n"
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

    def whole(self, completion: Completion, index: int) -> dict[str, Any]:
        """One choice of a whole answer."""
        ...

    def head(self, index: int, first: bool) -> str:
        """JSON of one choice of an event, up to the token's text."""
        ...

    def tail(self, logprobs: str, finish_reason: str) -> str:
        """And from behind the text on."""
        ...

    def logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """``offset``: characters of text before the first of them."""
        ...


class TokenText:
    """The text of single tokens, for log-probabilities; those that show none by themselves are named by their id."""

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode

    def __call__(self, token_id: int) -> str:
        text = "" if self._decode is None else self._decode([token_id])
        return text if text and "\ufffd" not in text else f"token_id:{token_id}"

    def raw(self, token_id: int) -> list[int] | None:
        """Its bytes, where they are known: those of a piece of a character are not."""
        text = self(token_id)
        return None if text == f"token_id:{token_id}" else list(text.encode())


class CompletionShape:
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, text: TokenText) -> None:
        self._text = text

    def whole(self, completion: Completion, index: int) -> dict[str, Any]:
        logprobs = None if completion.logprobs is None else self.logprobs(completion.logprobs, 0)
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

    def logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        texts = [self._text(token.token_id) for token in tokens]
        offsets = list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else []
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self._text(i): value for i, value in token.top} for token in tokens],
            "text_offset": offsets,
        }


class ChatShape:
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, text: TokenText) -> None:
        self._text = text

    def whole(self, completion: Completion, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": None if completion.logprobs is None else self.logprobs(completion.logprobs, 0),
            "finish_reason": completion.finish_reason.value,
        }

    def head(self, index: int, first: bool) -> str:
        # the role comes with the first token, not before it: an event without a token would be taken for one
        role = '"role":"assistant",' if first else ""
        return f'{{"index":{index},"delta":{{{role}"content":'

    def tail(self, logprobs: str, finish_reason: str) -> str:
        return f'}},"logprobs":{logprobs},"finish_reason":{finish_reason}}}'

    def logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        return {"content": [self._one(t) | {"top_logprobs": [self._one(top) for top in t.top]} for t in tokens]}

    def _one(self, token: TokenLogprob | tuple[int, float]) -> dict[str, Any]:
        token_id, logprob = token[0], token[1]
        return {"token": self._text(token_id), "logprob": logprob, "bytes": self._text.raw(token_id)}


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
            logprobs = json.dumps(self._shape.logprobs([token], offset))
        if event.finish_reason is not None:
            finish = json.dumps(event.finish_reason.value)
        return self._shape.tail(logprobs, finish) + "]"

    def _so_far(self, prompt: int, event: TokenEvent) -> str:
        return f',"usage":{json.dumps(usage(prompt, event.position + 1))}'
