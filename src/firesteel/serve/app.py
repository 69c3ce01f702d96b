"""The routes. ``Server`` holds what they share; ``create_app`` makes the ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from firesteel import __version__
from firesteel.config import SamplingParams
from firesteel.models.deepseek_v4 import chat_strings
from firesteel.serve import pages
from firesteel.serve.answers import ChatChoice, Choice, CompletionChoice, usage_of
from firesteel.serve.board import Board
from firesteel.serve.chat import chat_prompt
from firesteel.serve.client import EngineClient, EngineState
from firesteel.serve.errors import ApiError, bad, unavailable
from firesteel.serve.http import (
    EventStream,
    Gate,
    Json,
    as_api_error,
    dumps,
    error_response,
    read_json,
    unless_gone,
)
from firesteel.serve.limits import MAX_SAMPLES, check_ids, check_text
from firesteel.serve.messages import ModelInfo, Piece
from firesteel.serve.metrics import Metrics, RequestTimer
from firesteel.serve.openapi import describe
from firesteel.serve.protocol import (
    Asked,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    read,
)
from firesteel.serve.structured import chat_wish, wish_of
from firesteel.serve.tracing import NoTracer, Trace, Tracer
from firesteel.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger("firesteel.serve")

COMPLETION_TOKENS = 16  # default max_tokens of /v1/completions, as OpenAI's
LONG_TEXT = 20_000  # characters from which a text is tokenised beside the event loop
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class ServeOptions:
    """What concerns the HTTP side only."""

    names: tuple[str, ...] = ("firesteel",)  # the model's; the first is shown
    api_keys: tuple[str, ...] = ()
    max_request_bytes: int = 32 * 2**20
    cors_origins: tuple[str, ...] = ()
    tracer: Tracer = field(default_factory=NoTracer)


@dataclass
class Job:
    """One HTTP request for text: prompts, and a choice per sample of each."""

    asked: Asked
    prompts: list[list[int]]
    params: list[SamplingParams]
    choices: list[Choice]
    kind: str  # "text_completion" or "chat.completion"
    id: str
    thinking: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def samples(self) -> int:
        """Choices per prompt."""
        return self.params[0].n

    def take(self, prompt: int, piece: Piece) -> list[dict[str, Any]]:
        """A piece to its choice; raises ApiError if the sample failed."""
        if piece.end is not None and piece.end.finish_reason == "error":
            raise ApiError(500, f"{self.id}: {piece.end.error}", code="engine_error")
        return self.choices[prompt * self.samples + piece.index].take(piece)


class Server:
    """State and handlers."""

    def __init__(self, client: EngineClient, options: ServeOptions) -> None:
        self.client, self.options = client, options
        self.metrics, self.board = Metrics(options.names[0]), Board()
        self.tokenizer: Tokenizer | None = None
        self.draining = False
        self._end_think: int | None = None
        client.on_stats = self._engine_stats
        client.on_ready = self._engine_ready

    def _engine_stats(self, message: Mapping[str, Any]) -> None:
        self.metrics.stats(message)
        self.board.stats(message)

    def _engine_ready(self, info: ModelInfo) -> None:
        self.metrics.ready(info)
        self.board.ready(info)
        if info.has_tokenizer and self.tokenizer is None:
            self.tokenizer = Tokenizer.load(info.path)
            if self.tokenizer.has(chat_strings.END_THINK):
                self._end_think = self.tokenizer.id_of(chat_strings.END_THINK)

    # ---- probes ------------------------------------------------------------------
    async def health(self, request: Request) -> Response:
        """200 unless the engine is dead."""
        state = self.client.state
        alive = state in (EngineState.READY, EngineState.STARTING)
        body = {"status": state.value, **({} if alive else {"reason": self.client.reason})}
        return Json(body, 200 if alive else 503)

    async def ready(self, request: Request) -> Response:
        """200 if a request sent now would be answered."""
        if self.draining:
            raise unavailable("the server is shutting down")
        self.client.require_ready()
        return Json({"status": "ready"})

    async def version(self, request: Request) -> Response:
        """The package's version."""
        return Json({"version": __version__})

    async def show_metrics(self, request: Request) -> Response:
        """Prometheus text."""
        text = self.metrics.text(self.client.state is EngineState.READY, self.client.restarts)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        """The description of this API."""
        return Json(describe())

    # ---- models ------------------------------------------------------------------
    def _model_card(self, name: str) -> dict[str, Any]:
        info = self.client.info
        card = {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "firesteel",
            "root": self.options.names[0],
        }
        return {**card, "max_model_len": info.max_model_len if info is not None else None}

    async def models(self, request: Request) -> Response:
        """The one model, under all its names."""
        return Json({"object": "list", "data": [self._model_card(name) for name in self.options.names]})

    async def model(self, request: Request) -> Response:
        """The model by name."""
        name = request.path_params["name"]
        self._check_model(name)
        return Json(self._model_card(name))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.options.names:
            known = ", ".join(self.options.names)
            raise ApiError(
                404,
                f"model {name!r} is not served here; served: {known}",
                param="model",
                code="model_not_found",
            )

    # ---- tokens ------------------------------------------------------------------
    def _require_tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise bad(field, "the model has no tokenizer.json; send token ids to /v1/completions")
        return self.tokenizer

    async def _encode(self, field: str, text: str, fits: ModelInfo | None = None) -> list[int]:
        """Token ids; with ``fits``, a text that can't be a prompt of that model is refused at once."""
        tokenizer = self._require_tokenizer(field)
        if fits is not None:
            check_text(field, text, tokenizer, fits)
        try:
            if len(text) < LONG_TEXT:
                return tokenizer.encode(text)
            return await asyncio.to_thread(tokenizer.encode, text)
        except TokenizerError as err:
            raise bad(field, str(err)) from err

    async def _prompt_ids(self, prompt: str | list[int], special: bool, info: ModelInfo) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return _with_bos(await self._encode("prompt", prompt, info), special, info)

    async def tokenize(self, request: Request) -> Response:
        """Text or a chat to token ids."""
        raw = await read_json(request, self.options.max_request_bytes)
        info = self.client.require_ready()
        asked = read(TokenizeRequest, raw)
        self._check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise bad("prompt", "send either prompt or messages")
        if asked.messages is not None:
            rest = {k: v for k, v in raw.items() if k not in ("add_special_tokens", "return_token_strs")}
            chat = read(ChatRequest, rest)
            chat.check()
            ids = await self._encode("messages", chat_prompt(chat).text)
        else:
            ids = await self._encode("prompt", asked.prompt or "")
            ids = _with_bos(ids, asked.add_special_tokens is not False, info)
        body: dict[str, Any] = {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids}
        if asked.return_token_strs:
            tokenizer = self._require_tokenizer("prompt")
            body["token_strs"] = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
        return Json(body)

    async def detokenize(self, request: Request) -> Response:
        """Token ids to text, protocol tokens included."""
        raw = await read_json(request, self.options.max_request_bytes)
        info = self.client.require_ready()
        check_ids("tokens", raw.get("tokens"), info)
        asked = read(DetokenizeRequest, raw)
        self._check_model(asked.model)
        wrong = next((i for i in asked.tokens if not 0 <= i < info.vocab_size), None)
        if wrong is not None:
            raise bad("tokens", f"{wrong} is outside 0..{info.vocab_size - 1}")
        text = self._require_tokenizer("tokens").decode(asked.tokens, skip_special=False)
        return Json({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """The names of the tokens that evaluation harnesses ask for."""
        tokenizer = self._require_tokenizer("tokenizer")
        info = self.client.require_ready()

        def name(index: int) -> str:
            return tokenizer.token_bytes(index).decode("utf-8", "replace")

        ends = [name(i) for i in info.eos_token_ids[:1]]
        body = {"bos_token": name(info.bos_token_id), "eos_token": ends[0] if ends else None}
        return Json({"tokenizer_class": "firesteel", **body, "chat_template": None})

    # ---- text --------------------------------------------------------------------
    async def completions(self, request: Request) -> Response:
        """``/v1/completions``."""
        raw = await read_json(request, self.options.max_request_bytes)
        if self.client.info is not None:
            check_ids("prompt", raw.get("prompt"), self.client.info)
        asked = read(CompletionRequest, raw)
        info = self._admit(asked)
        asked.check()
        special = asked.add_special_tokens is not False
        prompts = [await self._prompt_ids(p, special, info) for p in asked.prompts()]
        scores = asked.prompt_logprobs
        if asked.echo and asked.logprobs is not None:
            scores = max(asked.logprobs, scores or 0)
        more: dict[str, Any] = {
            "logprobs": asked.logprobs,
            "echo": bool(asked.echo),
            "prompt_logprobs": scores,
        }
        more["structured_outputs"] = wish_of(asked)
        params = [asked.sampling(_room(info, p), COMPLETION_TOKENS, **more) for p in prompts]
        choices: list[Choice] = [
            CompletionChoice(i * params[0].n + s, prompt, asked, self.tokenizer)
            for i, prompt in enumerate(prompts)
            for s in range(params[0].n)
        ]
        name = f"cmpl-{secrets.token_hex(12)}"
        return await self._answer(request, Job(asked, prompts, params, choices, "text_completion", name))

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        asked = read(ChatRequest, await read_json(request, self.options.max_request_bytes))
        info = self._admit(asked)
        asked.check()
        chat = chat_prompt(asked)
        ids = await self._encode("messages", chat.text, info)
        more: dict[str, Any] = {"structured_outputs": chat_wish(asked, self._require_tokenizer("messages"))}
        more |= {"thinking": chat.thinking, "thinking_token_budget": asked.thinking_budget()}
        params = asked.sampling(_room(info, ids), None, logprobs=asked.score_count, **more)
        choices: list[Choice] = [ChatChoice(s, ids, asked, self.tokenizer, chat) for s in range(params.n)]
        name = f"chatcmpl-{secrets.token_hex(12)}"
        job = Job(asked, [ids], [params], choices, "chat.completion", name, chat.thinking)
        return await self._answer(request, job)

    def _admit(self, asked: Asked) -> ModelInfo:
        if self.draining:
            raise unavailable("the server is shutting down")
        info = self.client.require_ready()
        self._check_model(asked.model)
        return info

    async def _answer(self, request: Request, job: Job) -> Response:
        trace = self._trace(request, job)
        try:
            return await self._answer_traced(
                request, job, RequestTimer(self.metrics, len(job.choices), trace)
            )
        except BaseException as err:
            trace.fail(err)
            trace.end()
            raise

    def _trace(self, request: Request, job: Job) -> Trace:
        params, operation = job.params[0], job.kind.partition(".")[0]
        facts = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": job.asked.model or self.options.names[0],
            "gen_ai.response.id": job.id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.seed": params.seed,
        }
        return self.options.tracer.begin(f"{operation} {self.options.names[0]}", request.headers, facts)

    async def _answer_traced(self, request: Request, job: Job, timer: RequestTimer) -> Response:
        if len(job.choices) > MAX_SAMPLES:
            raise bad("prompt", f"{len(job.choices)} samples; at most {MAX_SAMPLES} per request")
        if not job.asked.stream:
            return Json(await unless_gone(request, self._whole(job, timer)))
        stack = contextlib.AsyncExitStack()
        opened = stack.enter_async_context(self.client.open(job.prompts, job.params, job.asked.tells_tokens))
        pieces = await unless_gone(request, opened)
        stack.callback(timer.close)
        return EventStream(self._events(job, pieces, timer), stack.aclose)

    async def _whole(self, job: Job, timer: RequestTimer) -> dict[str, Any]:
        async with self.client.open(job.prompts, job.params, job.asked.tells_tokens) as pieces:
            with contextlib.closing(timer):
                async for at, piece in pieces:
                    timer.note(at, piece)
                    job.take(at, piece)
        return {
            **self._head(job, job.kind),
            "choices": [choice.final() for choice in job.choices],  # type: ignore[attr-defined]
            "usage": self._usage(job),
        }

    async def _events(
        self, job: Job, pieces: AsyncIterator[tuple[int, Piece]], timer: RequestTimer
    ) -> AsyncIterator[bytes]:
        kind = "chat.completion.chunk" if job.kind == "chat.completion" else job.kind
        head = self._head(job, kind)
        try:
            async for at, piece in pieces:
                timer.note(at, piece)
                for choice in job.take(at, piece):
                    usage = {"usage": self._usage(job)} if job.asked.usage_always else {}
                    yield _event({**head, "choices": [choice], **usage})
            if job.asked.usage_wanted:
                yield _event({**head, "choices": [], "usage": self._usage(job)})
        except ApiError as err:
            timer.trace.fail(err)
            yield _event(err.body())
        yield DONE

    def _head(self, job: Job, kind: str) -> dict[str, Any]:
        name = job.asked.model or self.options.names[0]
        return {"id": job.id, "object": kind, "created": job.created, "model": name}

    def _usage(self, job: Job) -> dict[str, Any]:
        return usage_of(job.choices, job.samples, self._end_think, job.thinking)


def _event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def _with_bos(ids: list[int], special: bool, info: ModelInfo) -> list[int]:
    """A text gets the model's first token unless it has it already."""
    return [info.bos_token_id, *ids] if special and ids[:1] != [info.bos_token_id] else ids


def _room(info: ModelInfo, prompt: Sequence[int]) -> int:
    """Tokens that fit behind a prompt."""
    return max(min(info.max_model_len, info.pages * info.page_size) - len(prompt), 1)


def create_app(
    client: EngineClient,
    options: ServeOptions | None = None,
    on_server: Callable[[Server], None] = lambda _: None,
) -> Starlette:
    """The application; its lifespan starts and stops the engine. ``on_server`` is handed the Server."""
    options = options or ServeOptions()
    server = Server(client, options)
    on_server(server)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await client.start()
        try:
            yield
        finally:
            await client.stop()
            await asyncio.to_thread(options.tracer.close)

    get: dict[str, Callable[[Request], Any]] = {
        "/health": server.health, "/ping": server.health, "/ready": server.ready, "/version": server.version,
        "/metrics": server.show_metrics, "/openapi.json": server.openapi, "/tokenizer_info": server.tokenizer_info,
        "/v1/models": server.models, "/v1/models/{name:path}": server.model, **pages.handlers(server),
    }  # fmt: skip
    post: dict[str, Callable[[Request], Any]] = {
        "/v1/completions": server.completions, "/v1/chat/completions": server.chat,
        "/tokenize": server.tokenize, "/detokenize": server.detokenize,
    }  # fmt: skip
    routes = [Route(path, handler, methods=["GET"]) for path, handler in get.items()]
    routes += [Route(path, handler, methods=["POST"]) for path, handler in post.items()]
    known = {*get, *post}

    def count(path: str, status: int) -> None:
        route = path if path in known else "/v1/models/{name}" if path.startswith("/v1/models/") else "other"
        server.metrics.http.labels(route, str(status)).inc()

    async def failed(_: Request, err: Exception) -> Response:
        return error_response(as_api_error(err))  # type: ignore[arg-type]

    middleware = [Middleware(Gate, keys=options.api_keys, count=count, free=pages.FILES)]
    if options.cors_origins:
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=list(options.cors_origins),
                allow_methods=["*"],
                allow_headers=["*"],
            ),
        )
    return Starlette(
        routes=routes,
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={404: failed, 405: failed, ApiError: failed},
    )
