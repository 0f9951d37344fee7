"""From what a client hands to ``submit`` to a :class:`Request`: tokenised, checked, hashed. In the caller's thread."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final, Protocol

from runtime.errors import ContextLengthError
from runtime.llm.prefix import block_hashes
from runtime.records import FinishReason, RequestRecord
from runtime.request import Request, SamplingParams

_GREEDY: Final = SamplingParams()
_SAMPLING: Final = tuple(f.name for f in fields(SamplingParams))
_MOST_PRIORITY: Final = 2**31 - 1  # far beyond any use; keys of orderings are floats, and stay exact
_FOREVER_S: Final = 1e15  # 30 million years; whole numbers may be larger than any float


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class ServedModel(Protocol):
    """What the engine must know of a model; ``runtime.torch_backend.LoadedModel`` is one."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def tokenizer_error(self) -> str:
        """Why its tokenizer cannot be loaded; empty where there is one, or none at all."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def eos_token_ids(self) -> Collection[int]: ...

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """Fields of :class:`~runtime.request.SamplingParams` that a server fills in where a request does not name them."""
        ...


def lacks_tokenizer(model: ServedModel) -> str:
    """A clause about a model whose ``tokenizer`` is None."""
    if model.tokenizer_error:
        return f"the tokenizer of {model.name} cannot be loaded ({model.tokenizer_error})"
    return f"{model.name} has no tokenizer"


class Intake:
    """Makes requests for one engine. Thread-safe: it keeps nothing that changes.

    ``context`` is the longest prompt + output and ``kv_tokens`` the size of the KV pool, in tokens. ``share`` says whose
    prompts may find each other's KV blocks: ``all``, ``tenant`` (only those of one tenant) or ``none``. ``classes`` are
    the request classes there are; any if empty.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        context: int,
        kv_tokens: int,
        block_size: int,
        share: str,
        classes: Collection[str],
    ) -> None:
        self._model = model
        self._context = context
        self._kv_tokens = kv_tokens
        self._block_size = block_size
        self._share = share
        self._classes = frozenset(classes)

    def sampling(self, params: SamplingParams | None, changes: dict[str, Any]) -> SamplingParams:
        """``params`` with ``changes``. An unknown name raises ``TypeError`` that lists the valid ones."""
        for name in changes:
            if name not in _SAMPLING:
                raise TypeError(f"{name} is not an argument; besides those of submit there are {', '.join(_SAMPLING)}")
        params = _GREEDY if params is None else params
        return replace(params, **changes) if changes else params

    def salt(self, request: Request) -> bytes:
        """The salt of the request's block hashes."""
        return self._salt(request.tenant)

    def _salt(self, tenant: str) -> bytes:
        return tenant.encode() if self._share == "tenant" else b""

    def tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Token ids of ``prompt``. Raises ``ValueError`` if it is empty, or holds ids the model does not know."""
        model = self._model
        if isinstance(prompt, str):
            if model.tokenizer is None:
                raise ValueError(f"prompt is text, and {lacks_tokenizer(model)}; give it as a list of token ids")
            try:
                tokens = tuple(model.tokenizer.encode(prompt)) if prompt else ()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # half a surrogate pair, say; tokenizers raise what they like
                raise ValueError(f"prompt cannot be tokenised: {error}") from error
        else:
            try:
                tokens = tuple(map(operator.index, prompt))
            except TypeError as error:
                raise ValueError(f"prompt must be text or a list of token ids: {error}") from None
        if not tokens:
            raise ValueError("prompt is empty; it must hold at least one token")
        for unknown in (min(tokens), max(tokens)):
            if not 0 <= unknown < model.vocab_size:
                raise ValueError(
                    f"prompt holds token id {unknown}; {model.name} has a vocabulary of {model.vocab_size},"
                    f" so ids are between 0 and {model.vocab_size - 1}"
                )
        return tokens

    def request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        arrival: float,
        priority: int,
        tenant: str,
        request_class: str,
        deadline_s: float | None,
        timeout_s: float | None,
    ) -> Request:
        """A request that can run. Raises ``ValueError`` naming what is wrong, its value and what is allowed."""
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > _MOST_PRIORITY:
            allowed = f"a whole number between -{_MOST_PRIORITY} and {_MOST_PRIORITY}, higher ones go first"
            raise ValueError(f"priority is {priority!r}; it must be {allowed}")
        for name, value in (("request_id", request_id), ("tenant", tenant), ("request_class", request_class)):
            if not isinstance(value, str):
                raise ValueError(f"{name} is {value!r}; it must be text")
            if not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise ValueError(f"{name} is {value!r}; it must be text without half a surrogate pair") from None
        if self._classes and request_class not in self._classes:
            raise ValueError(f"request_class is {request_class!r}; the classes are {', '.join(sorted(self._classes))}")
        if params.stop and self._model.tokenizer is None:
            raise ValueError(f"stop is {params.stop!r}, and {lacks_tokenizer(self._model)}; use stop_token_ids")
        tokens = self.tokens(prompt)
        return Request(
            id=request_id,
            prompt=tokens,
            params=params,
            max_tokens=self._max_tokens(len(tokens), params.max_tokens),
            arrival=arrival,
            priority=priority,
            tenant=tenant,
            request_class=request_class,
            deadline=_later("deadline_s", arrival, deadline_s),
            expires=_later("timeout_s", arrival, timeout_s),
            block_hashes=(() if self._share == "none" else block_hashes(tokens, self._block_size, self._salt(tenant))),
        )

    def _max_tokens(self, prompt: int, requested: int | None) -> int:
        context, pool = self._context, self._kv_tokens
        least = prompt + (1 if requested is None else requested)
        what = f"prompt ({prompt} tokens) + max_tokens ({1 if requested is None else requested}) is {least}"
        if least > context:
            raise ContextLengthError(f"{what}; the context of {self._model.name} is {context} tokens")
        if least > pool:
            raise ContextLengthError(f"{what}; the KV pool holds {pool} tokens")
        return min(context, pool) - prompt if requested is None else requested


def _later(name: str, arrival: float, seconds: float | None) -> float | None:
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:  # a NaN is not, either
        raise ValueError(f"{name} is {seconds!r}; it must be a time above 0 s, or None")
    return None if seconds > _FOREVER_S else arrival + seconds


def never_ran(
    request: Request, reason: FinishReason, now: float, cause: str, retry_after_s: float | None = None
) -> RequestRecord:
    """The record of a request that ended before the scheduler saw it."""
    return RequestRecord(
        id=request.id,
        arrival=request.arrival,
        scheduled=None,
        finished=now,
        token_times=(),
        prompt_tokens=request.prompt_len,
        output_tokens=0,
        cached_tokens=0,
        preemptions=0,
        reason=reason,
        request_class=request.request_class,
        tenant=request.tenant,
        priority=request.priority,
        epoch_first=-1,
        epoch_last=-1,
        cause=cause,
        retry_after_s=retry_after_s,
    )
