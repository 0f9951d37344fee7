"""The application: OpenAI's endpoints over one engine, its health and its metrics."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from runtime.errors import AutotuneError
from runtime.llm.engine import Engine
from runtime.llm.intake import lacks_tokenizer
from runtime.llm.stream import Stream
from runtime.serving.answers import ChatShape, CompletionShape, Events, Shape, TokenText, frame, usage_of
from runtime.serving.errors import ApiError, api_error, bad_input, validation_error
from runtime.serving.lifecycle import Counted, Lifecycle, shutting_down
from runtime.serving.metrics import ServingMetrics
from runtime.serving.protocol import ChatRequest, CompletionRequest, GenerationRequest, Message, Prompt
from runtime.serving.streaming import EventStream, completed, end_all

log = logging.getLogger(__name__)

T = TypeVar("T")
LONG = 4000  # characters or token ids; to tokenise, check and hash more would hold up everybody else's tokens
EACH = 32  # as many more for each message of a chat or prompt of a list: what they take however short they are
HOUSEKEEPING_S = 0.5


@runtime_checkable
class ChatTokenizer(Protocol):
    """A tokenizer that knows the model's chat template."""

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]: ...


class Api:
    """The endpoints. ``keep`` is called every half a second, in a thread, while the server runs. ``regime``: for the metrics."""

    def __init__(
        self,
        engine: Engine,
        *,
        served_name: str | None = None,
        keep: Sequence[Callable[[], None]] = (),
        regime: Callable[[], str] | None = None,
    ) -> None:
        self.engine = engine
        self.name = served_name or engine.model.name
        self.metrics = ServingMetrics(engine, served_name=self.name, regime=regime)
        self.lifecycle = Lifecycle()
        self._keep = (self.metrics.fold, *keep)
        self._keeping = threading.Lock()
        self._failing: set[Callable[[], None]] = set()  # of them
        self._created = int(time.time())
        tokenizer = engine.model.tokenizer
        text = TokenText(None if tokenizer is None else tokenizer.decode)
        self._completion, self._chat = CompletionShape(text), ChatShape(text)

    # -- answers --------------------------------------------------------------------------------------------------------

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        self._accepts(body)
        return await self._answer(body, body.prompt, self._completion, "cmpl", request, self.engine.clock.now())

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        self._accepts(body)
        arrival = self.engine.clock.now()
        length = sum(len(m.role) + len(m.name or "") + len(m.content) + EACH for m in body.messages)
        prompt = await _aside(length > LONG, lambda: self._chat_tokens(body.messages))
        return await self._answer(body, [prompt], self._chat, "chatcmpl", request, arrival)

    async def _answer(
        self,
        body: GenerationRequest,
        prompts: Sequence[Prompt],
        shape: Shape,
        prefix: str,
        request: Request,
        arrival: float,
    ) -> Response:
        answer_id = f"{prefix}-{uuid.uuid4().hex}"
        streams = await self._submit(body, prompts, answer_id, arrival)
        if body.stream:
            begin = frame(answer_id, shape.chunk_kind, self.name)
            return EventStream(streams, lambda: self._events(body, prompts, shape, begin))
        done = await completed(streams, request.receive)
        whole = frame(answer_id, shape.kind, self.name)
        whole["choices"] = await _aside(
            any(completion.logprobs is not None for completion in done),  # each token has a text then
            lambda: [
                shape.whole(each, index, stream) for index, (each, stream) in enumerate(zip(done, streams, strict=True))
            ],
        )
        whole["usage"] = usage_of([completion.record for completion in done])
        return JSONResponse(whole)

    def _accepts(self, body: GenerationRequest) -> None:
        self.lifecycle.check()
        if body.model not in (None, self.name):
            message = f"model is {body.model!r}; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if body.request_class not in (known := {"default", *self.engine.slos}):
            message = f"request_class is {body.request_class!r}; the classes are {', '.join(sorted(known))}"
            raise ApiError(400, message, param="request_class")

    async def _submit(
        self, body: GenerationRequest, prompts: Sequence[Prompt], answer_id: str, arrival: float
    ) -> list[Stream]:
        """One request for each prompt, or none at all. Their ids begin with that of the answer. ``arrival``: when it was asked
        for."""
        streams: list[Stream] = []
        long = sum(len(prompt) + EACH for prompt in prompts) > LONG
        try:
            params = body.sampling(self.engine.model.sampling_defaults)
            for index, prompt in enumerate(prompts):
                request_id = answer_id if len(prompts) == 1 else f"{answer_id}-{index}"

                def submit(prompt: Prompt = prompt, request_id: str = request_id) -> Stream:
                    return self.engine.submit(
                        prompt,
                        params,
                        priority=body.priority,
                        tenant=body.user,
                        request_class=body.request_class,
                        request_id=request_id,
                        arrival=arrival,
                    )

                streams.append(await _aside(long, submit))
        except BaseException as error:
            end_all(streams, error)
            if isinstance(error, ValueError):
                raise bad_input(error, type(body).model_fields) from error
            raise
        return streams

    async def _events(
        self, body: GenerationRequest, prompts: Sequence[Prompt], shape: Shape, begin: dict[str, Any]
    ) -> Events:
        options = body.stream_options
        counts = None
        if options.continuous_usage_stats:  # counted while the engine already works on them
            texts = [len(prompt) + EACH for prompt in prompts if isinstance(prompt, str)]  # to tokenise, again
            long = sum(texts) > LONG
            counts = await _aside(long, lambda: [self._length(prompt) for prompt in prompts])
        return Events(shape, begin, closing_usage=options.include_usage, prompt_tokens=counts)

    def _length(self, prompt: Prompt) -> int:
        tokenizer = self.engine.model.tokenizer
        return len(tokenizer.encode(prompt)) if isinstance(prompt, str) and tokenizer is not None else len(prompt)

    def _chat_tokens(self, messages: Sequence[Message]) -> list[int]:
        tokenizer = self.engine.model.tokenizer
        if tokenizer is None:
            said = f"messages: {lacks_tokenizer(self.engine.model)}; give a list of token ids to /v1/completions"
            raise ApiError(400, said, param="messages")
        if not isinstance(tokenizer, ChatTokenizer):
            raise ApiError(400, f"messages: {self.name} has no chat template; use /v1/completions", param="messages")
        try:
            return tokenizer.encode_chat([message.as_dict() for message in messages])
        except ValueError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from error

    # -- about the server -----------------------------------------------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._card()]}

    async def model(self, name: str) -> dict[str, Any]:
        if name != self.name:
            raise ApiError(
                404, f"model is {name!r}; this server has {self.name!r}", param="model", code="model_not_found"
            )
        return self._card()

    def _card(self) -> dict[str, Any]:
        model, facts = self.engine.model, self.engine.facts.model
        context = model.max_model_len if facts is None else facts.max_model_len  # which the engine may have lowered
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "autotune",
            "root": model.name,
            "max_model_len": min(context, self.engine.kv_tokens),
        }

    async def health(self) -> Response:
        if self.lifecycle.draining:
            return JSONResponse({"status": "draining", "active": self.lifecycle.active}, 503)
        if self.engine.closed:
            error = self.engine.error
            return JSONResponse({"status": "dead"} | ({} if error is None else {"error": str(error)}), 503)
        return JSONResponse({"status": "ok"})

    async def exposition(self) -> Response:
        # in a thread: it waits for the step in progress, and what it writes is long
        text = await asyncio.to_thread(generate_latest, self.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        keeping = asyncio.create_task(self._keep_house())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.to_thread(self._keep_all)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await asyncio.to_thread(self._keep_all)

    def _keep_all(self) -> None:
        """A full disk under one of them must not keep the others from theirs, nor the server from serving."""
        with self._keeping:  # the last pass, at shutdown, waits for one that has begun
            for keep in self._keep:
                try:
                    keep()
                except Exception as error:
                    if keep not in self._failing:
                        log.error("housekeeping fails; the server goes on, and tries again: %s", error)
                    self._failing.add(keep)
                else:
                    self._failing.discard(keep)


def create_app(api: Api) -> FastAPI:
    """The ASGI application of ``api``."""
    app = FastAPI(title="autotune serve", lifespan=api.lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Counted, lifecycle=api.lifecycle)
    app.add_api_route("/v1/completions", api.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", api.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", api.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"])
    app.add_api_route("/health", api.health, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", api.exposition, methods=["GET"], response_model=None)

    def complain(request: Request, error: Exception) -> Response:
        answer = api_error(error)
        return JSONResponse(answer.body, answer.status, headers=answer.headers)

    def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        kind = ChatRequest if request.url.path.startswith("/v1/chat") else CompletionRequest
        return complain(request, validation_error(error.errors(), kind.model_fields))

    def unreadable(request: Request, error: Exception) -> Response:
        return complain(request, ApiError(400, "the body cannot be read as JSON in UTF-8", code="invalid_json"))

    def drained(request: Request, error: Exception) -> Response:
        return complain(request, shutting_down())

    def no_such_place(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        allowed = (getattr(error, "headers", None) or {}).get("Allow", "other methods")
        what = "there is no such path" if status == 404 else f"this path takes {allowed}"
        code = "not_found" if status == 404 else "method_not_allowed"
        return complain(request, ApiError(status, f"{request.method} {request.url.path}: {what}", code=code))

    for kind in (ApiError, AutotuneError, Exception):
        app.add_exception_handler(kind, complain)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(400, unreadable)
    app.add_exception_handler(404, no_such_place)
    app.add_exception_handler(405, no_such_place)
    app.add_exception_handler(503, drained)
    return app


async def _aside(long: bool, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if long else work()
